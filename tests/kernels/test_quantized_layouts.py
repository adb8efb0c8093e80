"""Packed weights hold what the blocks held, bit for bit, and no row's products depend on what is beside it."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.kernels.quantized import FORMATS, LANES, ZERO_POINTS, Format, Levels, dense, pack, unpack
from nbengine.kernels.quantized_parts import cut, join
from tests.kernels.quantized_weights import ALL_FORMATS, FORMAT_NAMES, random_parts
from tests.support.thorough import amount

NUMBERS = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
"""The numbers of MXFP4, by two bits of exponent and one of mantissa."""


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=amount(12, thorough=800))
@given(rows=st.integers(1, 50), cells=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_unpacking_gives_back_what_was_packed(name: str, rows: int, cells: int, seed: int) -> None:
    form = ALL_FORMATS[name]
    parts = random_parts(form, rows, cells * form.columns, seed)
    data = pack(form, parts)
    assert data.dtype is torch.uint8
    assert tuple(data.shape) == form.data_shape(rows, cells * form.columns)
    found = unpack(form, data, rows)
    for field in ("levels", "scales", "minima", "supers", "super_minima"):
        before, after = getattr(parts, field), getattr(found, field)
        assert (before is None) == (after is None)
        if before is not None:
            assert before.dtype is after.dtype
            assert torch.equal(before, after), field


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=amount(12, thorough=800))
@given(data=st.data(), rows=st.integers(1, 70), cells=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_a_part_of_a_packed_weight_is_the_packed_part(
    name: str, data: st.DataObject, rows: int, cells: int, seed: int
) -> None:
    form = ALL_FORMATS[name]
    parts = random_parts(form, rows, cells * form.columns, seed)
    for dim, size, unit in ((0, rows, 1), (1, cells, form.columns)):
        first = data.draw(st.integers(0, size - 1))
        kept = range(first * unit, data.draw(st.integers(first + 1, size)) * unit)
        found = cut(form, pack(form, parts), rows, dim, kept)
        assert torch.equal(found, pack(form, part_of(form, parts, dim, kept)))


@pytest.mark.parametrize("name", FORMAT_NAMES)
@settings(max_examples=amount(12, thorough=400))
@given(
    count=st.integers(1, 4), rows=st.integers(1, 40), cells=st.integers(1, 2), seed=st.integers(0, 2**32 - 1)
)
def test_joined_parts_are_the_packed_whole(name: str, count: int, rows: int, cells: int, seed: int) -> None:
    form = ALL_FORMATS[name]
    columns = cells * form.columns
    for dim, shape, each in ((0, (count * rows, columns), rows), (1, (rows, count * columns), columns)):
        whole = random_parts(form, *shape, seed)
        packed = [
            pack(form, part_of(form, whole, dim, range(place * each, place * each + each)))
            for place in range(count)
        ]
        assert torch.equal(join(form, packed, rows, dim), pack(form, whole))


def part_of(form: Format, whole: Levels, dim: int, kept: range) -> Levels:
    """The levels and scales of some rows or columns."""

    def part(tensor: torch.Tensor | None, columns: int = 1) -> torch.Tensor | None:
        return None if tensor is None else tensor[index(columns)]

    def index(columns: int) -> tuple[slice, ...]:
        if dim == 0:
            return (slice(kept.start, kept.stop),)
        return slice(None), slice(kept.start // columns, kept.stop // columns)

    scales = part(whole.scales, form.group)
    assert scales is not None
    return Levels(
        whole.levels[index(1)],
        scales,
        part(whole.minima, form.group),
        part(whole.supers, 256),
        part(whole.super_minima, 256),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_packed_weight_is_hardly_larger_than_its_blocks(name: str) -> None:
    form = ALL_FORMATS[name]
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    packed = form.cell_bytes / (form.columns * LANES)
    assert packed <= 1.03 * block_bytes / block_size


def test_the_dense_weight_is_what_the_definition_says() -> None:
    for name in FORMAT_NAMES:
        form = ALL_FORMATS[name]
        parts = random_parts(form, 5, 512, 7)
        found = dense(form, pack(form, parts), 5)
        for row, column in np.ndindex(5, 512):
            level: float = int(parts.levels[row, column])
            scale = float(parts.scales[row, column // form.group])
            if form.is_micro:
                scale, level = 2.0 ** (scale - 127), NUMBERS[level & 7] * (-1 if level & 8 else 1)
            minimum = 0.0 if parts.minima is None else float(parts.minima[row, column // form.group])
            if parts.supers is not None:
                scale *= float(parts.supers[row, column // 256])
                if parts.super_minima is not None:
                    minimum *= -float(parts.super_minima[row, column // 256])
            if form.has_zero:
                minimum *= -scale
            expected = scale * (level - (0 if form.is_micro else form.offset)) + minimum
            assert float(found[row, column]) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_levels_with_a_zero_point_are_held_without_loss() -> None:
    for bits, form in ZERO_POINTS.items():
        parts = random_parts(form, 3, 64, bits)
        assert parts.minima is not None
        exact = parts.levels.double() - parts.minima.repeat_interleave(32, 1).double()
        exact *= parts.scales.repeat_interleave(32, 1).double()
        assert torch.equal(dense(form, pack(form, parts), 3).double(), exact)
