"""Rows of a matrix, and the pieces in which they are walked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.transfer import upload

Rows = Tensor | slice
"""Some of the rows of a matrix: their indices (int64) or a range."""

ALL_ROWS = slice(None)

_CPU_PIECE_BYTES = 4 << 20
"""On a CPU rows are sampled in pieces of this size: then temporaries stay in cache, and the allocator gives
them memory that it has instead of new pages (a vocabulary of 150,000 takes a sixth of the time)."""
_DEVICE_PIECE_BYTES = 64 << 20
"""Elsewhere pieces only bound the memory of temporaries."""


def rows_of(positions: NDArray[np.int64], count: int, device: torch.device) -> Rows:
    """Return `positions` among `count` rows as an index on the device, or a range where they are all of
    them."""
    if len(positions) == count and (positions == np.arange(count)).all():
        return ALL_ROWS
    return upload(positions, device)


def take_rows(matrix: Tensor, rows: Rows) -> Tensor:
    """Return rows of a matrix: a view where they are a range, else a copy."""
    return matrix[rows] if isinstance(rows, slice) else matrix.index_select(0, rows)


def add_to_rows(matrix: Tensor, rows: Rows, values: Tensor) -> None:
    """Add values to rows of a matrix, all different, in place."""
    if isinstance(rows, slice):
        matrix[rows] += values
    else:
        matrix.index_add_(0, rows, values)


def pieces(rows: Rows, logits: Tensor, *, bounded: bool = False) -> Iterator[tuple[Rows, slice]]:
    """Cut rows of `logits` into pieces; each comes with its place among `rows`.

    On a GPU a piece is everything, unless `bounded` asks for a limit to the memory of temporaries.
    """
    count, vocab = logits.shape
    if isinstance(rows, Tensor):
        count = len(rows)
    size = max(1, count)
    if logits.device.type == "cpu":
        size = max(1, _CPU_PIECE_BYTES // (4 * vocab))
    elif bounded:
        size = max(1, _DEVICE_PIECE_BYTES // (4 * vocab))
    for start in range(0, count, size):
        members = slice(start, min(start + size, count))
        yield (rows[members] if isinstance(rows, Tensor) else members), members
