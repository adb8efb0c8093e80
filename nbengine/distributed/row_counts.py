"""The numbers of rows that the ranks of a data-parallel group have in a step, free of torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from nbengine.errors import NBEngineError


class Word(enum.IntEnum):
    """The meaning of a number that ranks tell each other."""

    ROWS = 0
    FLAG = 1

    def encode(self, value: int) -> int:
        """Return a number with its meaning."""
        return value * len(Word) + self

    def decode(self, words: Sequence[int]) -> list[int]:
        """Return the numbers of all ranks.

        Raises:
            NBEngineError: another rank has told a number of another meaning: all that follows would be mixed
                up.
        """
        strange = [rank for rank, word in enumerate(words) if word % len(Word) != self]
        if strange:
            raise NBEngineError(
                f"engine cores {strange} are at another place than this one, which shares {self.name}"
            )
        return [word // len(Word) for word in words]


class RowCounts:
    """The numbers of rows of all ranks, one rank's rows lying behind the other's."""

    def __init__(self, counts: Sequence[int], rank: int) -> None:
        self.counts = counts
        self.own = counts[rank]
        self.total = sum(counts)
        self.largest = max(counts)
        """The number of rows of the rank that has the most."""

    @cached_property
    def starts(self) -> list[int]:
        """Return the first row of each rank, and the end of the last one's."""
        return list(accumulate(self.counts, initial=0))

    @property
    def is_even(self) -> bool:
        """Return whether all ranks have equally many rows."""
        return self.total == len(self.counts) * self.largest

    def check(self, rows: int, *, own: bool) -> None:
        """Check that a tensor has the rows of this rank, or of all.

        Raises:
            NBEngineError: the tensor has another number of rows.
        """
        expected = self.own if own else self.total
        if rows != expected:
            raise NBEngineError(f"a tensor has {rows} rows where begin_step has announced {expected}")
