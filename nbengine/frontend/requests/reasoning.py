"""The marks around a model's reasoning, as texts of its chat template and as tokens for the engine core."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.parsing.reasoning.base import ReasoningParser
from nbengine.frontend.requests.prompt_length import TextEncoder
from nbengine.ipc.reasoning import ReasoningTokens
from nbengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class ReasoningMarks:
    """The texts around the reasoning of one answer.

    Attributes:
        endings: each ends the reasoning.
        openings: each may begin the answer, and then begins its reasoning; without any, the prompt has begun it.
        closing: the text, with one of `endings` in it, that ends reasoning whose budget is spent.
        introductions: each may stand between reasoning and answer, besides the white space that ends `closing`.
        final: texts of tokens that may end the output before there is an answer, such as the end of a call.

    Raises:
        InvalidArgumentError: there is no ending, a text is empty, or `closing` ends nothing.
    """

    endings: tuple[str, ...]
    closing: str
    openings: tuple[str, ...] = ()
    introductions: tuple[str, ...] = ()
    final: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("endings", "openings", "introductions", "final"):
            texts = getattr(self, name)
            if not all(texts) or (name == "endings" and not texts):
                raise InvalidArgumentError(f"reasoning.{name}", texts, "texts that are not empty")
        if not any(ending in self.closing for ending in self.endings):
            raise InvalidArgumentError("reasoning.closing", self.closing, "a text with one of the endings")

    def behind(self, prompt: str, *, may_begin: bool = True) -> ReasoningMarks | None:
        """Return the marks of an answer to this prompt, None if its reasoning is over or cannot begin.

        With `may_begin` the prompt ends where an answer begins, so that reasoning may begin there as well.
        """
        ending = prompt[-256:].rstrip()
        if any(ending.endswith(opening.rstrip()) for opening in self.openings):
            return replace(self, openings=())
        if not may_begin or any(ending.endswith(closing) for closing in self.endings):
            return None
        return self


def reasoning_marks(family: type[ReasoningParser], chat_template: str) -> ReasoningMarks:
    """Return the marks of a family of models: of several pairs of tags those of which the template speaks, by their
    endings or else by their openings."""
    spoken_of = ([pair for pair in family.tags if pair[side] in chat_template] for side in (1, 0))
    tags = next(filter(None, spoken_of), family.tags)
    return ReasoningMarks(
        endings=(*(ending for _, ending in tags), *family.other_endings),
        closing=family.closing_text().replace(family.closing_marker(), tags[0][1]),
        openings=() if family.is_always_closed else tuple(opening for opening, _ in tags),
        introductions=family.answer_begins,
        final=family.ends_without_answer,
    )


class ReasoningInputs:
    """A maker of the tokens of marks, safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, encoder: TextEncoder) -> None:
        self._encoder = encoder
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        self._token_to_id = tokenizer.token_to_id
        self._tokens_of = functools.lru_cache(maxsize=64)(self._tokens_of_marks)

    def tokens_for(
        self, marks: object, params: SamplingParams, *, is_known: bool = True
    ) -> ReasoningTokens | None:
        """Return what the engine core needs to know of a request's reasoning, None where it needs nothing.

        Args:
            marks: those of the prompt, None if its answer has no reasoning.
            is_known: the prompt says whether it has reasoning.

        Raises:
            InvalidArgumentError: a `thinking_budget` cannot be kept.
            InvalidTypeError: `marks` are something else.
        """
        if marks is not None and not isinstance(marks, ReasoningMarks):
            raise InvalidTypeError("reasoning", marks, "ReasoningMarks, or None")
        budget = params.thinking_budget
        if budget is not None and not is_known:
            allowed = "None, because it is not known where reasoning ends: the chat template has no mark for it, or was not used"
            raise InvalidArgumentError("thinking_budget", budget, allowed)
        if marks is None or (budget is None and params.structured_outputs is None):
            return None
        tokens = self._tokens_of(marks)
        if budget is not None:
            _check_closing(tokens.closing, params)
        return tokens

    def _tokens_of_marks(self, marks: ReasoningMarks) -> ReasoningTokens:
        fixed: list[list[int]] = []
        texts: list[str] = []
        for ending in marks.endings:
            token_ids = self._encode(ending)
            # Added tokens are cut out of a text before anything else, so nothing joins them with what is beside.
            if token_ids[0] in self._added and token_ids[-1] in self._added:
                fixed.append(token_ids)
            else:
                texts.append(ending)
        spaces = marks.closing[len(marks.closing.rstrip()) :]
        gaps = [*marks.introductions, *dict.fromkeys((spaces, "\n") if spaces else ())]
        return ReasoningTokens(
            openings=[self._encode(space + opening) for opening in marks.openings for space in ("", "\n")],
            endings=fixed,
            ending_texts=texts,
            closing=self._encode(marks.closing),
            gaps=[self._encode(gap) for gap in gaps],
            final_token_ids=[found for text in marks.final if (found := self._token_to_id(text)) is not None],
        )

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False)


def _check_closing(closing: list[int], params: SamplingParams) -> None:
    """Check that no other parameter forbids the tokens that close reasoning.

    Raises:
        InvalidArgumentError: one does; the message has the tokens.
    """
    if params.allowed_token_ids is not None and not set(closing).issubset(params.allowed_token_ids):
        allowed = f"None, or allowed_token_ids with {closing}, which close the reasoning"
        raise InvalidArgumentError("thinking_budget", params.thinking_budget, allowed)
    for words in params.bad_words_token_ids or ():
        if any(closing[place : place + len(words)] == words for place in range(len(closing))):
            allowed = f"without words of which the tokens {closing} are made, which close the reasoning"
            raise InvalidArgumentError("bad_words", params.bad_words, allowed)
