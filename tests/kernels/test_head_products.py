"""Products of heads with matrices of their own, which a program can call, against torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from nbengine.kernels.cpu.head_products import head_operation
from nbengine.kernels.cpu.threads import select_runner

SHAPES = [(16, 64), (24, 130), (128, 70), (33, 16), (5, 3), (192, 512)]
"""Numbers of a row, and outputs."""


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def multiply(x: Tensor, weight: Tensor, output: Tensor) -> None:
    function, arguments = head_operation(x, weight, output)
    select_runner()(function, ctypes.addressof(arguments), torch.get_num_threads())


@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("columns", "outputs"), SHAPES)
def test_each_head_is_multiplied_with_its_matrix_whatever_lies_around(
    columns: int, outputs: int, dtype: torch.dtype, *, stands: bool
) -> None:
    heads, rows = 3, 29
    x = torch.full((rows, heads, columns + 7), torch.nan)
    x[..., :columns] = numbers(rows, heads, columns, seed=0)
    shape = (heads, outputs + 2, columns + 1) if stands else (heads, columns + 2, outputs + 1)
    whole = torch.full(shape, torch.nan, dtype=dtype)
    inside = (outputs, columns) if stands else (columns, outputs)
    whole[:, : inside[0], : inside[1]] = numbers(heads, *inside, seed=1).to(dtype)
    weight = whole[:, : inside[0], : inside[1]]
    weight = weight.transpose(1, 2) if stands else weight
    found = torch.full((rows, heads, outputs + 5), 7.0)
    multiply(x[..., :columns], weight, found[..., :outputs])
    assert (found[..., outputs:] == 7).all()
    expected = torch.einsum("thn,hnm->thm", x[..., :columns].double(), weight.double())
    torch.testing.assert_close(found[..., :outputs].double(), expected, rtol=1e-5, atol=1e-5 * columns**0.5)
    for first, count in ((0, 1), (5, 7), (28, 1)):
        part = torch.empty(count, heads, outputs)
        multiply(x[first : first + count, :, :columns], weight, part)
        assert torch.equal(part, found[first : first + count, :, :outputs])
