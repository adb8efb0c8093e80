"""The compiled search for each row's largest number finds what numpy finds."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nbengine.kernels.cpu.largest import PARTS, LargestArguments, compile_largest
from tests.support.thorough import amount


def largest(rows: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The places and the numbers, of rows that lie apart and between which there are larger numbers."""
    count, width = rows.shape
    apart = np.full((count, width + 5), np.inf, np.float32)
    apart[:, :width] = rows
    peaks = np.full((count, PARTS), np.nan, np.float32)
    ids, values = np.full(count, -2), np.full(count, np.nan, np.float32)
    arguments = LargestArguments(
        rows=count,
        width=width,
        x=apart.ctypes.data,
        x_stride=apart.strides[0],
        peaks=peaks.ctypes.data,
        ids=ids.ctypes.data,
        values=values.ctypes.data,
    )
    for function, parts in zip(compile_largest(), (PARTS, 1), strict=True):
        arguments.counter, arguments.items, arguments.parts = 0, count, parts
        function.call(ctypes.addressof(arguments))
    return ids, values


@settings(max_examples=amount(40, thorough=6000))
@given(
    count=st.integers(1, 4),
    width=st.sampled_from([1, 2, 15, 16, 17, 100, 127, 128, 129, 1000, 4099]),
    levels=st.sampled_from([1, 2, 5, 10**6]),
    seed=st.integers(0, 10**9),
)
def test_it_is_the_first_of_the_largest(count: int, width: int, levels: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows = (chance.integers(-levels, levels, (count, width)) * 0.25).astype(np.float32)
    ids, values = largest(rows)
    assert ids.tolist() == rows.argmax(-1).tolist()
    assert values.tolist() == rows.max(-1).tolist()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 64, 99])
def test_a_row_with_a_number_that_is_not_finite_has_no_place(poison: float, place: int) -> None:
    rows = np.arange(300, dtype=np.float32).reshape(3, 100)
    rows[1, place] = poison
    ids, _ = largest(rows)
    assert ids.tolist() == [99, -1, 99]


def test_the_smallest_numbers_are_found_too() -> None:
    rows = np.full((2, 40), np.finfo(np.float32).min, np.float32)
    rows[1, 39] = 0.0
    ids, values = largest(rows)
    assert ids.tolist() == [0, 39]
    assert values.tolist() == [np.finfo(np.float32).min, 0.0]
