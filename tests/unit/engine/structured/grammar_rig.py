"""A vocabulary small enough for brute force, and grammars over it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from nbengine.engine.core import grammar_check
from nbengine.engine.core.structured import GuidanceGrammar, StructuredOutputManager

SCHEMAS = json.loads((Path(__file__).parents[3] / "data" / "json_schemas.json").read_text(encoding="utf-8"))
MERGED = ["ab", "bc", "aa", "abc", "cab", '":', "true"]
"""Tokens of several bytes beside the 256 of one byte."""
EOS, END = 256 + len(MERGED), 257 + len(MERGED)
VOCAB_SIZE = 300
"""More than the tokenizer has."""

Make = Callable[..., GuidanceGrammar]


class InThisProcess(grammar_check.GrammarChecker):
    """Checks without a process of its own, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def _exchange(self, question: bytes) -> bytes:
        self.texts.append(msgspec.json.decode(question, type=grammar_check.GrammarSource).text)
        return msgspec.json.encode(grammar_check._checked(question))


def allowed(manager: StructuredOutputManager, grammar: GuidanceGrammar) -> set[int]:
    """The tokens that may come next."""
    (row,) = manager.fill_bitmasks([grammar])
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def follows(manager: StructuredOutputManager, grammar: GuidanceGrammar, token_ids: list[int]) -> bool:
    """Return whether a text is accepted, and may end there."""
    return grammar.accept_tokens(token_ids) and EOS in allowed(manager, grammar)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids
