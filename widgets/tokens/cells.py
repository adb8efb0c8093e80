"""An answer's tokens as they are shown: the visible text of each, its probability, and its alternatives."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from nbengine.outputs import Logprob

PART = "◌"
"""The sign for a token that ends within a character; the token that completes it has the whole character."""
_MARKS = {"\n": "⏎", "\r": "␍", "\t": "⇥", " ": "·"}
_TURNING = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
_JOINERS = "\u200c\u200d"
_HIDDEN = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp", "Zs")
"""Categories of characters that cannot be seen, or that turn the direction of the text around them."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could stand in another's place; `label` shows every character of it."""

    token_id: int
    label: str
    probability: float


Piece = tuple[str, str]
"""A part of a token, as (mark, text): the mark is for text that could not be seen, and is empty otherwise."""


@dataclass(frozen=True, slots=True)
class TokenCell:
    """One token of an answer; `probability` is None where it is not known."""

    token_id: int
    pieces: tuple[Piece, ...]
    probability: float | None
    rank: int | None
    alternatives: tuple[Alternative, ...]


def token_cells(
    token_ids: Sequence[int], entries: Sequence[dict[int, Logprob]], most: int
) -> list[TokenCell]:
    """Make the cells of tokens with their entries, each with at most `most` of its likeliest alternatives."""
    return [_cell(token_id, entry, most) for token_id, entry in zip(token_ids, entries, strict=False)]


def alternatives_of(entry: dict[int, Logprob], most: int) -> tuple[Alternative, ...]:
    """Find the likeliest tokens of an entry, its own among them, in the order of their probability."""
    known = [(token_id, logprob) for token_id, logprob in entry.items() if not math.isnan(logprob.logprob)]
    known.sort(key=lambda item: item[1].logprob, reverse=True)
    return tuple(
        Alternative(token_id, label_of(token_id, logprob.decoded_token), math.exp(logprob.logprob))
        for token_id, logprob in known[:most]
    )


def label_of(token_id: int, text: str | None) -> str:
    """Return a token's text with a mark for each character that cannot be seen."""
    if text is None:
        return f"token {token_id}"
    if not text:
        return f"{PART} token {token_id}, part of a character"
    return "".join(map(_mark, text))


def percent(probability: float | None) -> str:
    """Format a probability: 100 %, 97 %, 3.1 %, 0.02 %."""
    if probability is None:
        return "unknown"
    share = probability * 100
    digits = 0 if share >= 10 else 1 if share >= 1 else 2
    return f"{share:.{digits}f} %" if share >= 0.005 else "< 0.01 %"


def shade(probability: float | None) -> int:
    """Return the shade of a token: from 0, as good as certain, to 9."""
    if probability is None:
        return 0
    return min(9, int((1 - min(1.0, probability)) * 10))


def _cell(token_id: int, entry: dict[int, Logprob], most: int) -> TokenCell:
    own = entry.get(token_id, Logprob(math.nan))
    probability = None if math.isnan(own.logprob) else math.exp(own.logprob)
    pieces = _pieces(token_id, own.decoded_token)
    return TokenCell(token_id, pieces, probability, own.rank, alternatives_of(entry, most))


def _pieces(token_id: int, text: str | None) -> tuple[Piece, ...]:
    if not text:
        return ((f"⟨{token_id}⟩" if text is None else PART, ""),)
    if text == " ":
        # A single space between words is visible without a mark.
        return (("", " "),)
    # Characters that join emoji or letters must stay between them.
    plain = "" if text.isspace() or not text.strip(_JOINERS) else " " + _JOINERS
    pieces: list[Piece] = []
    for character in text:
        if character not in plain and (mark := _mark(character)) != character:
            pieces.append((mark, "" if _is_dangerous(character) else character))
        elif pieces and not pieces[-1][0]:
            pieces[-1] = ("", pieces[-1][1] + character)
        else:
            pieces.append(("", character))
    return tuple(pieces)


def _is_dangerous(character: str) -> bool:
    """Return whether a character would look like another: control characters, and those that turn text."""
    if character in "\n\t":
        return False
    return unicodedata.category(character) == "Cc" or character in _TURNING


def _mark(character: str) -> str:
    """Return the mark for a character that cannot be seen, and a visible character as it is."""
    if character in _MARKS:
        return _MARKS[character]
    return f"⟨U+{ord(character):04X}⟩" if unicodedata.category(character) in _HIDDEN else character
