"""Stop strings, found in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found; the offsets count characters back from the end of the text so far."""

    stop: str
    start_from_end: int
    end_from_end: int


class StopStringMatcher:
    """A matcher that finds the first stop string of a text, whatever the pieces in which the text arrives.

    The first is the stop string that is complete first; of several that end at the same character, it is the
    longest. No other rule gives the same answer for every way of cutting the text into pieces.
    """

    __slots__ = ("_initials", "_keep", "_stops", "_tail")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._initials = frozenset(stop[0] for stop in stops)
        self._keep = max(map(len, stops)) - 1
        self._tail = ""

    def feed(self, chunk: str, *, may_stop: bool = True) -> StopMatch | None:
        """Append `chunk` and return the first stop string that ends inside it; with `may_stop=False` none
        does."""
        window = self._tail + chunk
        self._tail = window[len(window) - self._keep :] if len(window) > self._keep else window
        return self._find(window, len(window) - len(chunk)) if may_stop else None

    def held(self) -> int:
        """Count the characters at the end of the text that may still become part of a stop string."""
        tail = self._tail
        for start, character in enumerate(tail):
            if character in self._initials:
                suffix = tail[start:]
                if any(len(stop) > len(suffix) and stop.startswith(suffix) for stop in self._stops):
                    return len(suffix)
        return 0

    def _find(self, window: str, old: int) -> StopMatch | None:
        first: StopMatch | None = None
        for stop in self._stops:
            start = window.find(stop, max(0, old - len(stop) + 1))
            if start < 0:
                continue
            found = StopMatch(stop, len(window) - start, len(window) - start - len(stop))
            if first is None or (found.end_from_end, found.start_from_end) > (
                first.end_from_end,
                first.start_from_end,
            ):
                first = found
        return first
