"""A test repeats its proof often enough in each run, and many more times in `make thorough`."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

T = TypeVar("T")


def amount(quick: T, *, thorough: T) -> T:
    """Return the first one, or in `make thorough` the other: numbers of repeats, or lists of parameters.

    The quick one proves the property; the thorough one proves it with more numbers.
    """
    return thorough if THOROUGH else quick


def some(values: Iterable[T], *, ordinary: int) -> list[T]:
    """Return so few values for `pytest.mark.parametrize`, the first and the last among them and the others as far apart
    as they can be; all of them in `make thorough`.

    It is for values each of which proves the same: seeds, lengths, copies of a case. A value that alone proves something
    is named in the test.
    """
    every = list(values)
    if THOROUGH or len(every) <= ordinary:
        return every
    if ordinary == 1:
        return every[:1]
    return [every[number * (len(every) - 1) // (ordinary - 1)] for number in range(ordinary)]


def combinations(*lists: Iterable[Any], together: int = 2) -> list[tuple[Any, ...]]:
    """Return combinations of one value of each list, for `pytest.mark.parametrize`: all of them in `make thorough`,
    otherwise so few that any values of `together` lists still meet in one of them."""
    values = [list(each) for each in lists]
    chosen = list(itertools.product(*(range(len(each)) for each in values)))
    if not THOROUGH:
        chosen = _covering(chosen, list(itertools.combinations(range(len(values)), together)))
    return [tuple(each[place] for each, place in zip(values, places, strict=True)) for places in chosen]


def in_turn(first: Iterable[Any], *others: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return each value of the first list with the next combination of the other lists' values, for
    `pytest.mark.parametrize`; all combinations in `make thorough`."""
    values, rest = list(first), list(itertools.product(*others))
    if THOROUGH:
        return [(value, *each) for value in values for each in rest]
    return [(value, *each) for value, each in zip(values, itertools.cycle(rest))]


def _covering(all_of_them: list[tuple[int, ...]], groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Choose combinations, each time one that has the most which the ones before have not, of values that were chosen
    the least."""

    def meetings(places: tuple[int, ...]) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        return {(group, tuple(places[axis] for axis in group)) for group in groups}

    def uses(places: tuple[int, ...]) -> int:
        return sum(used[pair] for pair in itertools.combinations(enumerate(places), 2))

    of = {places: meetings(places) for places in all_of_them}
    missing = set().union(*of.values())
    used: Counter[Any] = Counter()
    chosen = []
    while missing:
        best = max(of, key=lambda places: (len(of[places] & missing), -uses(places)))
        chosen.append(best)
        missing -= of[best]
        used.update(itertools.combinations(enumerate(best), 2))
    return sorted(chosen)
