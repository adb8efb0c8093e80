"""Markers, found in a text that arrives in pieces."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable


class Markers:
    """A set of markers to look for; the longest of those that begin at the same place counts. See `Markers.of`."""

    __slots__ = ("_initials", "_longest", "_pattern", "_prefixes", "texts")

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted(set(texts), key=lambda text: (-len(text), text)))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._longest = max(map(len, self.texts), default=0)
        initials = "|".join(sorted({re.escape(text[0]) for text in self.texts}))
        self._initials = re.compile(initials or r"(?!)")
        self._prefixes = frozenset(text[:size] for text in self.texts for size in range(1, len(text)))

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(*texts: str) -> Markers:
        """Return the set of these markers, which is made once."""
        return Markers(texts)

    def find(self, text: str, start: int, *, final: bool = False) -> re.Match[str] | None:
        """Find the first marker from `start` on; unless `final`, one that more text may make longer is not
        found yet."""
        match = self._pattern.search(text, start)
        if match is not None and match.end() == len(text) and not final and match[0] in self._prefixes:
            return None
        return match

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """Match a marker that begins at `start`."""
        return self._pattern.match(text, start)

    def held_from(self, text: str, start: int) -> int:
        """Return the place, `start` or later, from which on the text may be the beginning of a marker; the
        text's length if no such place exists."""
        place = max(start, len(text) - self._longest + 1)
        while (match := self._initials.search(text, place)) is not None:
            place = match.start()
            if text[place:] in self._prefixes:
                return place
            place += 1
        return len(text)

    def may_begin_in(self, text: str) -> bool:
        """Tell whether a marker may begin anywhere in the text; it does not in nearly all pieces of an answer."""
        return self._initials.search(text) is not None

    def may_begin_at(self, text: str, start: int) -> bool:
        """Tell whether all the text from `start` on may be the beginning of a marker, or is empty."""
        return start >= len(text) or text[start:] in self._prefixes


class SpecialTokenFilter:
    """A filter that takes the texts of special tokens out of a text that arrives in pieces."""

    __slots__ = ("_held", "_kept", "_markers")

    def __init__(self, special_tokens: frozenset[str], kept: frozenset[str]) -> None:
        """Take out all of `special_tokens` but those that occur in `kept`, the markers of a format."""
        self._markers, self._kept = _special_markers(special_tokens, kept)
        self._held = ""

    def feed(self, chunk: str, *, final: bool = False) -> str:
        """Take in the next piece and return the text that is new."""
        if not self._held and not self._markers.may_begin_in(chunk):
            return chunk
        text = self._held + chunk
        parts, place = [], 0
        while (match := self._markers.find(text, place, final=final)) is not None:
            end = match.end() if match[0] in self._kept else match.start()
            parts.append(text[place:end])
            place = match.end()
        held = len(text) if final else self._markers.held_from(text, place)
        self._held = text[held:]
        if not parts:
            return text[place:held]
        parts.append(text[place:held])
        return "".join(parts)


@functools.lru_cache(maxsize=64)
def _special_markers(special_tokens: frozenset[str], kept: frozenset[str]) -> tuple[Markers, frozenset[str]]:
    is_kept = frozenset(token for token in special_tokens if any(token in marker for marker in kept))
    # A marker that begins like a special token, or is longer, is not to be torn.
    return Markers((special_tokens | kept) - {""}), is_kept | kept
