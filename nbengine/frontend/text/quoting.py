"""Special tokens that somebody writes into a message: they stay text, so that no message can end itself or speak as
somebody else.

A template writes its special tokens as text, too, and a tokenizer makes a token of that text wherever it stands. So the
text of special tokens in a message is marked before the template is applied. What has no mark afterwards is the
template's own, and gets a spelling that nobody can guess; the marks go, and a copy of the tokenizer that knows special
tokens by these spellings alone makes tokens of the text.
"""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from nbengine.frontend.requests.prompt_length import PromptLimit, TextEncoder

TRUSTED_ROLES = ("assistant",)
"""The roles whose messages the model has written, with its special tokens, which templates look for."""
_PRIVATE_USE = 0xF0000, 0xFFFFD
"""Characters that have no meaning, and that no normalizer changes."""
_SPELLING_CHARACTERS = 6
_MARK_DIGITS = 24
"""Digits of a mark: whatever a template does with a text (`tojson`, `upper`, Python's own notation of a dict), digits
stay as they are."""
_SHORTEST = 2
"""Characters of the shortest special token that is looked for: the mark stands between the first and the rest."""


def _spelling() -> str:
    first, last = _PRIVATE_USE
    return "".join(chr(first + secrets.randbelow(last - first + 1)) for _ in range(_SPELLING_CHARACTERS))


class QuotingEncoder:
    """An encoder of prompts that templates make, safe to use from any thread: of messages, `quote` marks what is to stay
    text, and `encode` and `unquoted` take the text that the template has made of them."""

    def __init__(self, encoder: TextEncoder) -> None:
        self._plain = encoder
        added = encoder.tokenizer.get_added_tokens_decoder().values()
        texts = [token.content for token in added if token.special]
        self._special = sorted({text for text in texts if len(text) >= _SHORTEST}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._special)) or r"(?!)")
        self._mark = "".join(secrets.choice("0123456789") for _ in range(_MARK_DIGITS))
        self._opening = _spelling()

    def quote(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Mark the text of special tokens in all messages but the model's own."""
        return [
            message
            if message["role"] in TRUSTED_ROLES
            else {**self._quoted(message), "role": message["role"]}
            for message in messages
        ]

    def unquoted(self, text: str) -> str:
        """Return a text without marks."""
        return text.replace(self._mark, "")

    def encode(self, text: str, limit: PromptLimit | None) -> list[int]:
        """Return the tokens of a text, without tokens that the tokenizer would add.

        Raises:
            InvalidArgumentError: as `TextEncoder.encode` does.
        """
        if self._mark not in text:
            return self._plain.encode(text, limit, add_special_tokens=False)
        spelled = self._pattern.sub(lambda found: self._opening + found[0], text)
        return self._encoder.encode(self.unquoted(spelled), limit, add_special_tokens=False)

    def _quoted(self, content: Any) -> Any:
        if isinstance(content, str):
            return self._pattern.sub(lambda found: found[0][0] + self._mark + found[0][1:], content)
        if isinstance(content, Mapping):
            return {self._quoted(key): self._quoted(value) for key, value in content.items()}
        if isinstance(content, list):
            return [self._quoted(part) for part in content]
        return content

    @functools.cached_property
    def _encoder(self) -> TextEncoder:
        """Make the copy of the tokenizer, which takes a moment and is seldom needed."""
        from tokenizers import Tokenizer

        description = json.loads(self._plain.tokenizer.to_str())
        # Nothing is added to a prompt, and what would be added is named by the old texts.
        description["post_processor"] = None
        special = set(self._special)
        for token in description["added_tokens"]:
            if token["content"] in special:
                token["content"] = self._opening + token["content"]
        model = description["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {self._renamed(text, special): number for text, number in vocabulary.items()}
        elif vocabulary is not None:
            model["vocab"] = [[self._renamed(text, special), *rest] for text, *rest in vocabulary]
        if model.get("unk_token") in special:
            model["unk_token"] = self._opening + model["unk_token"]
        return TextEncoder(Tokenizer.from_str(json.dumps(description)))

    def _renamed(self, text: str, special: set[str]) -> str:
        return self._opening + text if text in special else text
