"""A reference implementation of stop strings, by their definition."""

from __future__ import annotations

import itertools
from typing import TypeVar

S = TypeVar("S", str, list[int])


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The definition: the stop string that is complete first, the longest of those, and where it starts."""
    for end in range(1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return longest, end - len(longest)
    return None


def chunkings(text: S) -> list[list[S]]:
    """Every way to cut a text, or a list of tokens, into pieces."""
    cuts = itertools.product((False, True), repeat=max(0, len(text) - 1))
    result = []
    for cut in cuts:
        bounds = [0, *(position for position, is_cut in enumerate(cut, 1) if is_cut), len(text)]
        result.append([text[begin:end] for begin, end in itertools.pairwise(bounds)])
    return result
