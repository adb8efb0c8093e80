"""Histograms with fixed bounds: small, cheap to fill, to add up and to subtract."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate
from typing import ClassVar, Self

import msgspec

# fmt: off
SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)
"""Upper bounds of durations, from half a millisecond to half an hour."""
TOKENS = (
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0, 20_000.0, 50_000.0,
    100_000.0, 200_000.0,
)
"""Upper bounds of numbers of tokens."""
# fmt: on


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """A count of values by size, since some start; `Seconds` and `Tokens` have the bounds.

    `counts[i]` counts the values that exceed `BOUNDS[i - 1]` and do not exceed `BOUNDS[i]`; the last one
    counts those beyond all bounds. Counts and total only grow, so that two states of one histogram, subtracted,
    are the histogram of the values that came between them.
    """

    BOUNDS: ClassVar[tuple[float, ...]] = ()

    counts: list[int] = []
    """One more than there are bounds; empty before the first value."""
    total: float = 0.0
    """The sum of the values."""

    @property
    def count(self) -> int:
        """Return the number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Return the mean of the values, None without any."""
        count = self.count
        return self.total / count if count else None

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, as often as `times` says."""
        if not self.counts:
            self.counts = [0] * (len(self.BOUNDS) + 1)
        self.counts[bisect_left(self.BOUNDS, value)] += times
        self.total += value * times

    def cumulated(self) -> list[int]:
        """Return, for each bound and then for infinity, the number of values that do not exceed it."""
        return list(accumulate(self.counts or [0] * (len(self.BOUNDS) + 1)))

    def quantile(self, share: float) -> float | None:
        """Return the value that a `share` of all values, from 0 to 1, does not exceed; None without any.

        Within a bucket the values are taken to lie evenly; those beyond all bounds count as the last bound.
        """
        below, wanted = 0, share * self.count
        for index, count in enumerate(self.counts):
            if count and below + count >= wanted:
                if index == len(self.BOUNDS):
                    return self.BOUNDS[-1]
                low = self.BOUNDS[index - 1] if index else 0.0
                return low + (self.BOUNDS[index] - low) * max(0.0, wanted - below) / count
            below += count
        return None

    def copy(self) -> Self:
        """Return a copy that later values leave alone."""
        return type(self)(self.counts.copy(), self.total)

    def plus(self, other: Self) -> Self:
        """Return the histogram of the values of both."""
        if not (self.counts and other.counts):
            return (self if self.counts else other).copy()
        both = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return type(self)(both, math.fsum((self.total, other.total)))

    def minus(self, earlier: Self) -> Self:
        """Return the histogram of the values that came since an earlier state of this one."""
        if not earlier.counts:
            return self.copy()
        later = [a - b for a, b in zip(self.counts, earlier.counts, strict=True)]
        return type(self)(later, self.total - earlier.total)


class Seconds(Histogram, array_like=True, gc=False):
    """A histogram of durations."""

    BOUNDS: ClassVar[tuple[float, ...]] = SECONDS


class Tokens(Histogram, array_like=True, gc=False):
    """A histogram of numbers of tokens."""

    BOUNDS: ClassVar[tuple[float, ...]] = TOKENS
