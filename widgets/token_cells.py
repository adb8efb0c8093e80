"""An answer's tokens as they are shown: what can be seen of each, how probable it was, what else could have been said."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from nbengine.outputs import Logprob

PART = "◌"
"""Stands for a token that ends within a character; the token that completes it has the whole character."""
_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·"}
_TURNING = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs")
"""Categories of characters that cannot be seen, or that turn the direction of the text around them."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """What could stand in a token's place; `label` shows every character of it."""

    token_id: int
    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class TokenCell:
    """One token of an answer. `mark` is shown before `text` where the text alone could not be seen, and is not part of
    it; `probability` is None where it is not known."""

    token_id: int
    text: str
    mark: str
    probability: float | None
    rank: int | None
    alternatives: tuple[Alternative, ...]


def token_cells(
    token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]], most: int
) -> list[TokenCell]:
    """The cells of tokens with their entries, each with its likeliest alternatives, at most so many."""
    return [_cell(token_id, entry, most) for token_id, entry in zip(token_ids, entries, strict=False)]


def alternatives_of(entry: dict[int, Logprob], most: int) -> tuple[Alternative, ...]:
    """The likeliest tokens of an entry, its own among them, in the order of their probability."""
    known = [(token_id, logprob) for token_id, logprob in entry.items() if not math.isnan(logprob.logprob)]
    known.sort(key=lambda item: item[1].logprob, reverse=True)
    return tuple(
        Alternative(token_id, label_of(token_id, logprob.decoded_token), math.exp(logprob.logprob))
        for token_id, logprob in known[:most]
    )


def label_of(token_id: int, text: str | None) -> str:
    """A token's text with a mark for each character that cannot be seen."""
    if text is None:
        return f"token {token_id}"
    if not text:
        return f"{PART} token {token_id}, part of a character"
    return "".join(_MARKS.get(character) or _visible(character) for character in text)


def percent(probability: float | None) -> str:
    """A probability as people read it: 100 %, 97 %, 3.1 %, 0.02 %."""
    if probability is None:
        return "unknown"
    share = probability * 100
    digits = 0 if share >= 10 else 1 if share >= 1 else 2
    return f"{share:.{digits}f} %" if share >= 0.005 else "< 0.01 %"


def shade(probability: float | None) -> int:
    """How strongly a token is shaded: from 0, as good as certain, to 9."""
    if probability is None:
        return 0
    return min(9, int((1 - min(1.0, probability)) * 10))


def _cell(token_id: int, entry: dict[int, Logprob], most: int) -> TokenCell:
    own = entry.get(token_id, Logprob(math.nan))
    text = own.decoded_token
    probability = None if math.isnan(own.logprob) else math.exp(own.logprob)
    shown = "".join(character for character in text or "" if not _is_dangerous(character))
    alternatives = alternatives_of(entry, most)
    return TokenCell(token_id, shown, _mark(token_id, text), probability, own.rank, alternatives)


def _mark(token_id: int, text: str | None) -> str:
    if text is None:
        return f"⟨{token_id}⟩"
    if not text:
        return PART
    if text.isspace():
        # A single space between words is seen well enough.
        return (
            "" if text == " " else "".join(_MARKS.get(character) or _visible(character) for character in text)
        )
    if "\n" in text:
        return _MARKS["\n"]
    return "" if text.isprintable() else "".join(_visible(c) for c in text if not c.isprintable())


def _is_dangerous(character: str) -> bool:
    """Whether it would be seen as something else than it is: control characters, and those that turn the text."""
    if character in "\n\t":
        return False
    return unicodedata.category(character) == "Cc" or character in _TURNING


def _visible(character: str) -> str:
    if unicodedata.category(character) in _HIDDEN:
        return f"⟨U+{ord(character):04X}⟩"
    return character
