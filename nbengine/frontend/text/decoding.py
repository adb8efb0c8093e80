"""This module says how a tokenizer turns tokens into text, as far as a stream of them has to know it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REACH = 7
"""The most characters that one match of the clean-up takes in: " n ' t" has six, and one decides about it."""
_INERT = frozenset("abcdfghijklopquwxyz")
"""The characters that end every match; a choice of common ones is enough."""


_LOCAL = frozenset(("ByteFallback", "ByteLevel", "Fuse", "Replace", "Sequence"))
"""The decoders that treat all tokens alike, wherever they stand."""
_CLEANED_CONTEXT = 64
"""Tokens before a text that the clean-up may join with it; a chain of apostrophes has no end."""


class TextDecoding:
    """A tokenizer, and what its decoder does across the borders of tokens.

    Args:
        tokenizer: the tokenizer itself.
        clean_up: take out spaces in front of punctuation and English short forms, as transformers does for
            tokenizers with `clean_up_tokenization_spaces`.
    """

    __slots__ = ("byte_ids", "clean_up", "looks_back", "special", "tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, clean_up: bool = False) -> None:
        self.tokenizer = tokenizer
        self.clean_up = clean_up
        added = tokenizer.get_added_tokens_decoder()
        self.special = {token_id: token.content for token_id, token in added.items() if token.special}
        """The contents of the special tokens, by their ids."""
        self.byte_ids = frozenset(_byte_ids(tokenizer))
        """The tokens that are single bytes, where the decoder replaces all bytes of a run that is not UTF-8."""
        self.looks_back = clean_up or _looks_back(tokenizer)
        """True if the text of a token depends on what stands before it."""

    def context_of(self, prompt_token_ids: Sequence[int] | None, *, skip_special_tokens: bool) -> list[int]:
        """Return the tokens at the end of a prompt that decide how the text behind it begins: most decoders
        of words and pieces write the first token of a text without the space before it.

        Empty if nothing of the prompt is text, or the decoder does not look back.
        """
        if not self.looks_back or not prompt_token_ids:
            return []
        most = _CLEANED_CONTEXT if self.clean_up else 1
        found: list[int] = []
        for token_id in reversed(prompt_token_ids):
            skipped = skip_special_tokens and token_id in self.special
            if skipped or self.tokenizer.id_to_token(token_id) is None:
                continue
            found.append(token_id)
            # The bytes of a run are one text.
            if len(found) >= most and token_id not in self.byte_ids:
                break
        return found[::-1]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> TextDecoding:
        """Make the decoding that `tokenizer.decode` has."""
        backend = tokenizer.backend_tokenizer
        # For BPE transformers asks for a second switch, because the clean-up takes real spaces out there.
        corrupts = type(backend.model).__name__ == "BPE"
        asked = getattr(
            tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False
        )
        return cls(backend, clean_up=bool(tokenizer.clean_up_tokenization_spaces) and (asked or not corrupts))


def _looks_back(tokenizer: Tokenizer) -> bool:
    """Return whether the text of a token depends on whether it is the first one."""
    decoder = tokenizer.decoder
    # Without a decoder there is a space between two tokens.
    return decoder is None or not set(_types(json.loads(decoder.__getstate__()))) <= _LOCAL


def _byte_ids(tokenizer: Tokenizer) -> Iterator[int]:
    decoder = tokenizer.decoder
    if decoder is None or "ByteFallback" not in set(_types(json.loads(decoder.__getstate__()))):
        return
    for byte in range(256):
        for piece in {f"<0x{byte:02X}>", f"<0x{byte:02x}>"}:
            token_id = tokenizer.token_to_id(piece)
            if token_id is not None:
                yield token_id


def _types(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _types(part)


class SpaceCleaner:
    """A filter that takes out the spaces which transformers' `clean_up_tokenization` takes out, from a text
    that arrives in pieces.

    The clean-up only removes spaces, and the six characters behind a space decide about it. Therefore the
    text from the first space among the last characters on is held back.
    """

    __slots__ = ("_num_given", "_window")

    def __init__(self) -> None:
        self._window = ""
        self._num_given = 0
        """The characters of the cleaned window that have been given out."""

    def feed(self, chunk: str) -> str:
        """Take in the next piece and return the cleaned text that is new and stays."""
        window = self._window + chunk
        space = window.find(" ", max(0, len(window) - _REACH))
        cleaned = _cleaned(window)
        # The clean-up keeps all other characters, so that their number leads to a place behind it.
        num_before = space - window.count(" ", 0, space)
        end = len(cleaned) if space < 0 else _place_behind(cleaned, num_before)
        given, self._num_given = cleaned[self._num_given : end], max(end, self._num_given)
        self._window = window
        self._shorten()
        return given

    def begin_behind(self, text: str) -> int:
        """Take in the text that stands before; return the number of characters that are given out of it
        later."""
        return len(_cleaned(text)) - len(self.feed(text))

    def rest(self) -> str:
        """Return what was held back, at the end of the text."""
        given = _cleaned(self._window)[self._num_given :]
        self._window, self._num_given = "", 0
        return given

    def _shorten(self) -> None:
        """Drop the part of the window that no later match reaches: all up to a character in no match."""
        held = len(_cleaned(self._window)) - self._num_given
        last = next((i for i in range(len(self._window) - 1, -1, -1) if self._window[i] in _INERT), -1)
        behind = self._window[last + 1 :]
        if last >= 0 and held <= len(_cleaned(behind)):
            self._num_given = len(_cleaned(behind)) - held
            self._window = behind


def _cleaned(text: str) -> str:
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


_REPLACED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""The pairs that transformers' `clean_up_tokenization` replaces, in its order."""


def _place_behind(text: str, count: int) -> int:
    """Return the place behind this many characters that are no spaces."""
    if not count:
        return 0
    for place, character in enumerate(text, 1):
        count -= character != " "
        if not count:
            return place
    raise AssertionError("the text has fewer characters")
