"""Means with their intervals: plain arithmetic on scores that are given.

All intervals are two-sided, of `CONFIDENCE`, and take the values for independent. Truth values have Wilson's
interval, numbers Student's. The difference between pairs of truth values has Wald's interval with the
adjustment of Bonett and Price (2012), which holds where few pairs differ, too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

CONFIDENCE = 0.95
"""The share of such intervals that contain the true mean."""
_Z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
_MOST_STEPS = 100


@dataclass(frozen=True)
class Estimate:
    """A mean of `n` values, and the interval from `low` to `high` around it.

    `mean` is None without a value, `low` and `high` are None where the values are too few to tell.
    """

    mean: float | None
    low: float | None
    high: float | None
    n: int


def of_truths(num_true: int, n: int) -> Estimate:
    """Estimate the share of truth values that are true, with Wilson's interval."""
    if n == 0:
        return Estimate(None, None, None, 0)
    share = num_true / n
    weight = _Z * _Z / n
    centre = (share + weight / 2) / (1 + weight)
    half = _Z / (1 + weight) * math.sqrt(share * (1 - share) / n + weight / (4 * n))
    return _around(share, centre, half, n, least=0.0)


def of_numbers(values: Sequence[float]) -> Estimate:
    """Estimate the mean of numbers, with Student's interval; a single number has none."""
    if not values:
        return Estimate(None, None, None, 0)
    mean, n = float(statistics.mean(values)), len(values)
    if n == 1:
        return Estimate(mean, None, None, 1)
    half = student_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def of_differences_of_truths(num_gained: int, num_lost: int, n: int) -> Estimate:
    """Estimate the difference of two shares over the same `n` things.

    `num_gained` of them are true in the second share alone, `num_lost` in the first alone.
    """
    if n == 0:
        return Estimate(None, None, None, 0)
    gained, lost = (num_gained + 1) / (n + 2), (num_lost + 1) / (n + 2)
    centre = gained - lost
    half = _Z * math.sqrt((gained + lost - centre * centre) / (n + 2))
    return _around((num_gained - num_lost) / n, centre, half, n, least=-1.0)


@lru_cache(maxsize=1024)
def student_quantile(degrees: int) -> float:
    """Return the t for which Student's distribution has `CONFIDENCE` between -t and t."""
    # The share grows ever more slowly with t, so that Newton's steps from below never go too far.
    t = _Z
    for _ in range(_MOST_STEPS):
        step = (CONFIDENCE - _central_share(t, degrees)) / (2 * _density(t, degrees))
        t += step
        if abs(step) < 1e-13 * t:
            break
    return t


def _around(mean: float, centre: float, half: float, n: int, *, least: float) -> Estimate:
    # Rounding must not put the mean outside, nor an end where no mean can be.
    low, high = max(least, min(mean, centre - half)), min(1.0, max(mean, centre + half))
    return Estimate(mean, low, high, n)


def _central_share(t: float, degrees: int) -> float:
    """Return the share of Student's distribution between -t and t: a finite sum for whole degrees of freedom."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = total = cosine if is_odd else 1.0
    for factor in range(2 + is_odd, degrees - 1, 2):
        term *= cosine * cosine * (factor - 1) / factor
        total += term
    if not is_odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def _density(t: float, degrees: int) -> float:
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    return math.exp(log - (degrees + 1) / 2 * math.log1p(t * t / degrees))
