"""A table of entries for the rows of a batch, any number a row, in flat arrays: all rows are worked on at
once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class RowTable:
    """`entries[i]`, a record of `dtype`, belongs to row `rows[i]`."""

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        self.rows = np.empty(0, np.int64)
        self.entries: NDArray[np.void] = np.empty(0, dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: int, **columns: Any) -> None:
        """Add entries to a row, given by the fields of the dtype: arrays of one length, or one value for
        all."""
        (count,) = np.broadcast_shapes(*(np.shape(column)[:1] for column in columns.values()))
        added = np.empty(count, self.entries.dtype)
        for name, column in columns.items():
            added[name] = column
        self.rows = np.append(self.rows, np.full(count, row))
        self.entries = np.concatenate([self.entries, added])

    def remove(self, row: int) -> None:
        """Drop the entries of a row."""
        others = self.rows != row
        if not others.all():
            self.rows, self.entries = self.rows[others], self.entries[others]

    def move(self, source: int, target: int) -> None:
        """Give the entries of a row to another, which has none."""
        self.rows[self.rows == source] = target
