"""Quantised parts of a checkpoint go into the slots of a model's weights: packed as they are, or as values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from nbengine.errors import ModelLoadError
from nbengine.kernels.quantized import LANES, NO_NUMBER, SPAN, Levels
from nbengine.models.layers.weights import WeightSlot

T = TypeVar("T")
_CHUNK = 1 << 22
"""Values of a matrix that are worked on at a time, so that the memory for it is bounded."""


def fill_slots(items: Iterable[T], fill: Callable[[T], int], on_bytes: Callable[[int], None]) -> None:
    """Call `fill` for every weight or piece of one, each on one thread, and `on_bytes` with the bytes that it has
    read.

    Spreading every operation over all threads instead would make them wait for each other a few thousand
    times, which is slow when other processes want the cores too.
    """
    with _single_threaded_operations() as num_threads, ThreadPoolExecutor(num_threads) as pool:
        for num_bytes in pool.map(torch.inference_mode()(fill), items):
            on_bytes(num_bytes)


@contextlib.contextmanager
def _single_threaded_operations() -> Iterator[int]:
    """Let threads that are started in the block run torch's operations alone; yield the number of threads
    used before."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def check_scales(parts: Levels, message: str) -> None:
    """Check that all scales and minima are finite.

    Raises:
        ModelLoadError: one is not; the error has the message.
    """
    found = (parts.scales, parts.minima, parts.supers, parts.super_minima)
    if parts.scales.dtype is torch.uint8 and (parts.scales == NO_NUMBER).any():
        raise ModelLoadError(message)
    if not all(part is None or part.isfinite().all() for part in found):
        raise ModelLoadError(message)


def ranges_of(slot: WeightSlot) -> tuple[range, range]:
    """Return the rows and the columns that a slot takes of a checkpoint's matrix."""
    rows, columns = map(range, slot.full_shape)
    first, *others = slot.index
    return rows[first], columns[others[0]] if others else columns


def whole_spans(columns: range, num_columns: int) -> range:
    """Return the columns of all spans of 32 of which some are in `columns`."""
    return range(columns.start // SPAN * SPAN, min(num_columns, -(-columns.stop // SPAN) * SPAN))


def chunks_of(slot: WeightSlot) -> Iterator[tuple[range, Tensor]]:
    """Yield the rows of a matrix that a slot takes, whole tiles of them at a time, and where they go."""
    rows, columns = ranges_of(slot)
    each = max(1, _CHUNK // max(1, len(columns)) // LANES) * LANES
    for first in range(0, len(rows), each):
        last = min(first + each, len(rows))
        place = slice(first, last) if slot.form is None else slice(first // LANES, -(-last // LANES))
        yield rows[first:last], slot.tensor[place]
