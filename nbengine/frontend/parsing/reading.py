"""The way of a chat prompt's answer format, from the chat template to the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbengine.errors import InvalidTypeError
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import AUTO, TAGS, AnswerFormat, answer_format
from nbengine.frontend.parsing.schemas import ToolSchema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ANSWER_KEY = "answer"
"""The key of a prompt's `AnswerReading`."""


def special_tokens_of(tokenizer: PreTrainedTokenizerFast) -> frozenset[str]:
    """Return the texts of a tokenizer's special tokens."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(token.content for token in added.values() if token.special)


def added_token_ids_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the ids of a tokenizer's added tokens, special or not, by their texts, as `tool_grammar` takes
    them."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items()}


def answer_reading(
    template: str,
    prompt: str,
    tools: Sequence[ToolSchema],
    special_tokens: frozenset[str],
    *,
    reasoning_parser: str = AUTO,
    tool_parser: str = AUTO,
) -> AnswerReading | None:
    """Make the reading of the answer to a prompt that `template` has made; None if nothing is to be found in
    it.

    Calls are looked for only if there are tools. A prompt that ends with the tag that opens reasoning tells of
    reasoning where the template, which need not name the tag that closes it, tells nothing. For the names of
    parsers see `answer_format`, whose errors this raises.
    """
    chosen = answer_format(template, reasoning_parser, tool_parser, special_tokens=special_tokens)
    if chosen.reasoning is None and reasoning_parser == AUTO and AnswerFormat(TAGS).is_opened_by(prompt):
        chosen = answer_format(template, TAGS, tool_parser, special_tokens=special_tokens)
    if not tools:
        chosen = chosen.without_tools()
    if not chosen:
        return None
    # Special tokens can only be in a text that keeps them.
    left_out = special_tokens if chosen.keeps_special_tokens else frozenset()
    return AnswerReading(chosen, tuple(tools), chosen.is_opened_by(prompt), left_out)


def answer_of(prompt: Any) -> AnswerReading | None:
    """Return the reading that a prompt carries, None if it has none.

    Raises:
        InvalidTypeError: it carries something else.
    """
    found = prompt.get(ANSWER_KEY) if isinstance(prompt, Mapping) else None
    if found is not None and not isinstance(found, AnswerReading):
        raise InvalidTypeError(
            f"prompt[{ANSWER_KEY!r}]", found, "what render_chat has put there, or without that key"
        )
    return found
