"""What stop strings mean, by definition."""

from __future__ import annotations

import itertools


def first_stop(text: str, stops: list[str]) -> tuple[str, int] | None:
    """The definition: the stop string that is complete first, the longest of those, and where it starts."""
    for end in range(1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return longest, end - len(longest)
    return None


def chunkings(text: str) -> list[list[str]]:
    """Every way to cut `text` into pieces."""
    cuts = itertools.product((False, True), repeat=max(0, len(text) - 1))
    result = []
    for cut in cuts:
        pieces = [text[:1]]
        for character, new_piece in zip(text[1:], cut, strict=True):
            if new_piece:
                pieces.append(character)
            else:
                pieces[-1] += character
        result.append(pieces)
    return result
