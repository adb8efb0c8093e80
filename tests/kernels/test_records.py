"""A record holds a span's integers, its scale and their sums, bit for bit as torch computes them."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from nbengine.kernels.cpu.products import ProductArguments, compile_round_rows
from nbengine.kernels.cpu.records import RECORD_BYTES, SCALE_AT, SUM_AT
from nbengine.kernels.quantized import SPAN


def records_of(x: Tensor) -> Tensor:
    """Round x [rows, columns]; return [rows * spans, bytes]."""
    rows, columns = x.shape
    found = torch.full((rows, columns // SPAN * RECORD_BYTES), 0xA5, dtype=torch.uint8)
    arguments = ProductArguments(
        items=1,
        item_size=rows,
        rows=rows,
        spans=columns // SPAN,
        x=x.data_ptr(),
        x_stride=x.stride(0) * x.element_size(),
        records=found.data_ptr(),
        record_stride=found.stride(0),
    )
    compile_round_rows().call(ctypes.addressof(arguments))
    return found.view(-1, RECORD_BYTES)


def assert_records(x: Tensor) -> None:
    found, spans = records_of(x), x.reshape(-1, SPAN)
    largest = spans.abs().amax(1, keepdim=True)
    factor = torch.where(largest == 0, 0.0, 127 / largest)
    levels = (spans * factor).round()
    halves = levels.view(-1, 2, SPAN // 2).sum(2)
    scale = largest[:, 0] / 127
    assert torch.equal(found[:, :SPAN].view(torch.int8).float(), levels)
    total = halves.sum(1)
    expected = torch.stack([scale, scale * total, total, halves[:, 0]], 1)
    assert torch.equal(found[:, SCALE_AT:].view(torch.float32), expected)


@pytest.mark.parametrize("power", [1, 5])
def test_numbers_of_all_sizes(power: int) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(power)) ** power
    assert_records(x * torch.logspace(-30, 25, 64)[:, None])


def test_ties_zeros_and_equal_numbers() -> None:
    x = torch.randint(-254, 255, (16, 96), generator=torch.Generator().manual_seed(1)).float() / 2
    x[3, :40], x[4], x[5], x[6], x[7] = 0.0, 0.0, -0.0, 1.0, -3e38
    x[:, 0] = 127
    assert_records(x)


@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_what_is_not_finite_spoils_the_scales_of_its_span_alone(poison: float, place: int) -> None:
    x = torch.ones(1, 3 * SPAN)
    x[0, SPAN + place] = poison
    found = records_of(x)[:, SCALE_AT:SUM_AT].view(torch.float32)
    assert found.isnan().all(1).tolist() == [False, True, False]
