"""Rows of the history in a flat array of numbers: the oldest one goes when the array is full."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_right
from typing import Any

from nbengine.metrics.history import HistoryRow

_NUMBERS = [name for name in HistoryRow.__struct_fields__ if name not in ("rank", "seconds")]
_WHOLE = [
    index
    for index, name in enumerate(_NUMBERS)
    if "ttft" not in name and "itl" not in name and "usage" not in name and name != "time"
]
ROW_BYTES = 8 * len(_NUMBERS)
"""Bytes of a row."""


class RowRing:
    """The last `capacity` rows of one engine core, each `seconds` long, in the order of their starts."""

    def __init__(self, rank: int, seconds: int, capacity: int) -> None:
        self._rank = rank
        self._seconds = seconds
        self._capacity = capacity
        self._numbers = array("d")
        self._first = 0
        """The place of the oldest row; 0 while there is room for more."""

    def __len__(self) -> int:
        return len(self._numbers) // len(_NUMBERS)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the rows take, with the room for the next ones."""
        return sys.getsizeof(self._numbers)

    def append(self, row: HistoryRow) -> None:
        """Add a row behind the others."""
        values = (getattr(row, name) for name in _NUMBERS)
        numbers = array("d", (math.nan if value is None else value for value in values))
        if len(self) < self._capacity:
            self._numbers.extend(numbers)
            return
        begin = self._first * len(_NUMBERS)
        self._numbers[begin : begin + len(_NUMBERS)] = numbers
        self._first = (self._first + 1) % self._capacity

    def __getitem__(self, index: int) -> HistoryRow:
        begin = self._place(index)
        numbers: list[Any] = [
            None if math.isnan(number) else number for number in self._numbers[begin : begin + len(_NUMBERS)]
        ]
        for place in _WHOLE:
            if numbers[place] is not None:
                numbers[place] = int(numbers[place])
        start, *others = numbers
        return HistoryRow(self._rank, start, self._seconds, *others)

    def behind(self, start: float) -> int:
        """Return the index of the first row that begins after `start`."""
        starts = self._numbers
        return bisect_right(range(len(self)), start, key=lambda index: starts[self._place(index)])

    def resize(self, capacity: int) -> None:
        """Have room for `capacity` rows from now on, and drop the oldest ones if there are more."""
        begin = self._first * len(_NUMBERS)
        self._numbers = self._numbers[begin:] + self._numbers[:begin]
        self._first = 0
        self._capacity = capacity
        del self._numbers[: max(0, len(self) - capacity) * len(_NUMBERS)]

    def _place(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return (self._first + index) % len(self) * len(_NUMBERS)
