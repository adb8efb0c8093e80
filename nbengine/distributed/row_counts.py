"""How many rows each rank of a data-parallel group has in a step, free of torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

from nbengine.errors import NBEngineError


class Word(enum.IntEnum):
    """What a number means that ranks tell each other."""

    ROWS = 0
    FLAG = 1

    def encode(self, value: int) -> int:
        """A number with its meaning."""
        return value * len(Word) + self

    def decode(self, words: Sequence[int]) -> list[int]:
        """The numbers of all ranks.

        Raises:
            NBEngineError: another rank has told something else: what follows would be exchanged by chance.
        """
        strange = [rank for rank, word in enumerate(words) if word % len(Word) != self]
        if strange:
            raise NBEngineError(
                f"engine cores {strange} are at another place than this one, which shares {self.name}"
            )
        return [word // len(Word) for word in words]


class RowCounts:
    """The rows of all ranks, as they lie one rank's after the other's."""

    def __init__(self, counts: Sequence[int], rank: int) -> None:
        self.counts = counts
        self.own = counts[rank]
        self.total = sum(counts)
        self.largest = max(counts)
        """Rows of the rank that has the most."""

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each rank, and the end of the last one's."""
        return list(accumulate(self.counts, initial=0))

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many."""
        return self.total == len(self.counts) * self.largest

    def check(self, rows: int, *, own: bool) -> None:
        """Check that a tensor has the rows of this rank, or of all.

        Raises:
            NBEngineError: it does not.
        """
        expected = self.own if own else self.total
        if rows != expected:
            raise NBEngineError(f"a tensor has {rows} rows where begin_step has announced {expected}")
