"""The length that a prompt may have, checked before the prompt is tokenized where that is possible."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from nbengine.checks import require_utf8
from nbengine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG_TEXT = 16_384
"""Texts of this many characters or more are tokenized without keeping other threads from running."""
_COMPOSED = 4
"""The most bytes of a text of which Unicode's composition (NFC) makes one."""
_GROWING = ("Prepend", "Replace")
_BYTES = 256


class AtLeast(int):
    """A number of which only a lower bound is known."""

    def __repr__(self) -> str:
        return f"at least {int(self)}"


@dataclass(frozen=True)
class PromptLimit:
    """The most tokens that a prompt may have, and the text with which an error says what is allowed."""

    most: int
    allowed: str

    def check(self, length: int) -> None:
        """Raise `InvalidArgumentError` if a prompt of `length` tokens is too long."""
        if length > self.most:
            raise InvalidArgumentError("prompt", length, self.allowed)


class TextEncoder:
    """An encoder of texts, safe to use from any thread; a long text leaves the interpreter to other
    threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._most_bytes = most_bytes_of_token(tokenizer)

    def encode(
        self,
        text: str,
        limit: PromptLimit | None = None,
        *,
        add_special_tokens: bool = True,
        name: str = "prompt",
    ) -> list[int]:
        """Return the tokens of a text.

        Raises:
            InvalidArgumentError: the text has more tokens than `limit`, whatever the tokenizer makes of it,
                or cannot be written as UTF-8; the message names the argument `name`.
        """
        require_utf8(name, text)
        if limit is not None:
            limit.check(self.least_tokens(text))
        tokenizer = self.tokenizer
        if len(text) < LONG_TEXT:
            token_ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return token_ids
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def least_tokens(self, text: str) -> AtLeast:
        """Return a lower bound of the number of tokens of a text; 0 where nothing is known."""
        if self._most_bytes is None or len(text) < self._most_bytes:
            return AtLeast(0)
        return AtLeast(-(-len(text.encode(errors="replace")) // self._most_bytes))


class _Model(msgspec.Struct):
    """The model in `tokenizer.json`, whose vocabulary is read for BPE alone."""

    type: str
    vocab: msgspec.Raw
    byte_fallback: bool = False


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool
    rstrip: bool


class _Description(msgspec.Struct):
    """The part of `tokenizer.json` that `most_bytes_of_token` needs; the merges, most of the file, are skipped."""

    model: _Model
    added_tokens: list[_AddedToken]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None


def most_bytes_of_token(tokenizer: Tokenizer) -> int | None:
    """Return the most bytes of a text that one token stands for; None if that may be any number.

    The number is known of tokenizers that lose nothing of a text: those whose alphabet is bytes, or falls
    back to them.
    """
    description = msgspec.json.decode(tokenizer.to_str(), type=_Description)
    pre_tokenizers = _parts(description.pre_tokenizer, "pretokenizers")
    kinds = [part["type"] for part in pre_tokenizers]
    if description.model.type != "BPE" or any(_loses_text(part) for part in pre_tokenizers):
        return None
    vocabulary = msgspec.json.decode(description.model.vocab, type=dict[str, int])
    if "ByteLevel" in kinds:
        # It writes each byte as one character: with 256 tokens of one character no byte is unknown.
        has_all_bytes = sum(len(token) == 1 for token in vocabulary) >= _BYTES
    else:
        has_all_bytes = description.model.byte_fallback and all(
            tokenizer.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(_BYTES)
        )
    factor = 1
    for part in _parts(description.normalizer, "normalizers"):
        if part["type"] == "NFC":
            factor = _COMPOSED
        elif part["type"] not in _GROWING or not _grows(part):
            return None
    # An added token may take all the white space beside it.
    strips = any(token.lstrip or token.rstrip for token in description.added_tokens)
    if strips or not has_all_bytes:
        return None
    added = (token.content for token in description.added_tokens)
    return factor * max(len(token.encode()) for token in itertools.chain(vocabulary, added))


def _parts(description: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """List the steps of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if description is None:
        return []
    if description["type"] != "Sequence":
        return [description]
    return [part for inner in description[name] for part in _parts(inner, name)]


def _loses_text(pre_tokenizer: dict[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    if kind == "Split":
        return bool(pre_tokenizer["behavior"] == "Removed")
    return kind not in ("ByteLevel", "Digits", "Metaspace")


def _grows(normalizer: dict[str, Any]) -> bool:
    """Return whether a normalizer never makes a text shorter."""
    if normalizer["type"] == "Prepend":
        return True
    pattern = normalizer["pattern"].get("String")
    return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
