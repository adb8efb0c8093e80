"""A record holds a span's integers, its scale and their sums, bit for bit as torch computes them."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from nbengine.kernels.cpu.products import ProductArguments, compile_round_rows
from nbengine.kernels.cpu.records import EIGHT_BITS, SIXTEEN_BITS, RecordLayout
from nbengine.kernels.quantized import SPAN

BOTH = [EIGHT_BITS, SIXTEEN_BITS]


def records_of(layout: RecordLayout, x: Tensor) -> Tensor:
    """Round x [rows, columns]; return [rows * spans, bytes]."""
    rows, columns = x.shape
    found = torch.full((rows, columns // SPAN * layout.bytes), 0xA5, dtype=torch.uint8)
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
    compile_round_rows(layout).call(ctypes.addressof(arguments))
    return found.view(-1, layout.bytes)


def assert_records(layout: RecordLayout, x: Tensor) -> None:
    found, spans = records_of(layout, x), x.reshape(-1, SPAN)
    largest, most = spans.abs().amax(1, keepdim=True), {8: 127, 16: 127 * 256}[layout.bits]
    # A number divided by a tensor is its reciprocal times the number, for torch.
    factor = torch.where(largest == 0, 0.0, torch.full_like(largest, most) / largest)
    levels = (spans * factor).round()
    planes = found[:, : layout.scale_at].view(torch.int8).float()
    if layout.bits == 16:
        # A byte of -128 is one that not every processor multiplies.
        levels[(levels + 128) % 256 == 0] += 1
        assert planes.min() >= -127
        planes = planes[:, :SPAN] * 256 + planes[:, SPAN:]
    halves = levels.view(-1, 2, SPAN // 2).sum(2)
    scale = largest[:, 0] / most
    assert torch.equal(planes, levels)
    total = halves.sum(1)
    expected = torch.stack([scale, scale * total, total, halves[:, 0]], 1)
    assert torch.equal(found[:, layout.scale_at :].view(torch.float32), expected)


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("power", [1, 5])
def test_numbers_of_all_sizes(power: int, layout: RecordLayout) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(power)) ** power
    assert_records(layout, x * torch.logspace(-30, 25, 64)[:, None])


@pytest.mark.parametrize("layout", BOTH)
def test_ties_zeros_and_equal_numbers(layout: RecordLayout) -> None:
    x = torch.randint(-254, 255, (16, 96), generator=torch.Generator().manual_seed(1)).float() / 2
    x[3, :40], x[4], x[5], x[6], x[7] = 0.0, 0.0, -0.0, 1.0, -3e38
    x[:, 0] = 127
    assert_records(layout, x)


def test_every_integer_of_16_bits() -> None:
    x = torch.arange(-127 * 256, 127 * 256 + 1).float()
    x = torch.cat([x.view(-1, 1), torch.full((len(x), 1), 127 * 256.0), torch.zeros(len(x), 30)], 1)
    assert_records(SIXTEEN_BITS, x)


@pytest.mark.parametrize("layout", BOTH)
@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 15, 16, 31])
def test_what_is_not_finite_spoils_the_scales_of_its_span_alone(
    poison: float, place: int, layout: RecordLayout
) -> None:
    x = torch.ones(1, 3 * SPAN)
    x[0, SPAN + place] = poison
    found = records_of(layout, x)[:, layout.scale_at : layout.sum_at].view(torch.float32)
    assert found.isnan().all(1).tolist() == [False, True, False]
