"""Requests that think first: a grammar binds the answer alone, and a budget bounds the reasoning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from nbengine.errors import RefusedArgumentError, RequestError
from nbengine.ipc.reasoning import ReasoningTokens
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.grammar import Grammar
from nbengine.scheduler.reasoning import Decode, ReasoningPhase, ReasoningTracker

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher
    from numpy.typing import NDArray

MAX_MARK = 256
"""Most tokens or characters of a mark, which is looked for behind every token of reasoning."""
_EVERY_TOKEN = 0xFFFF_FFFF


class AnswerGrammar(Grammar, Protocol):
    """The grammar of an answer, and what it has to do with the library's masks."""

    matcher: LLMatcher

    def pass_over(self, count: int) -> None:
        """Count tokens of the output that are not the grammar's."""

    def finish_row(self, row: NDArray[np.uint32]) -> None:
        """Complete a row of the mask, which `matcher` has filled in."""


class ThinkingGrammar:
    """A `Grammar` of reasoning and an answer, of which `answer` is the grammar, None if it needs none.

    In reasoning that an answer in a grammar must follow, no end token is allowed but those of
    `ReasoningTokens.final_token_ids`. Before reasoning has begun, the output may go on with an opening or with
    the answer; and with a gap or the answer right behind the reasoning.
    """

    __slots__ = ("_answer", "_banned", "_fits", "_num_tried", "_tokenize", "_tracker")

    def __init__(
        self,
        tracker: ReasoningTracker,
        answer: AnswerGrammar | None,
        banned: Collection[int] = (),
        tokenize: Callable[[str], list[int]] | None = None,
    ) -> None:
        """Begin with an empty output.

        Args:
            banned: tokens that reasoning must not have, if the answer has a grammar.
            tokenize: divides text into tokens; needed where a text ends the reasoning.
        """
        self._tracker = tracker
        self._answer = answer
        self._banned = banned
        self._tokenize = tokenize
        self._fits = True
        """The tokens of an opening or a gap so far are also the beginning of an answer."""
        self._num_tried = 0
        """The number of them that the answer's grammar has taken."""

    @property
    def error(self) -> str:
        if self._tracker.error or self._answer is None:
            return self._tracker.error
        return self._answer.error

    @property
    def is_over(self) -> bool:
        after = (ReasoningPhase.GAP, ReasoningPhase.ANSWER)
        return self._answer is None and self._tracker.phase in after

    @property
    def matcher(self) -> LLMatcher | None:
        """The library's part of the present row; None if it has none."""
        bound = self._tracker.phase not in (ReasoningPhase.REASONING, ReasoningPhase.CLOSING)
        return self._answer.matcher if self._answer is not None and bound and self._fits else None

    def accept_tokens(self, token_ids: list[int]) -> bool:
        return all(map(self._accept, token_ids))

    def is_terminated(self) -> bool:
        return self._answer is not None and self._answer.is_terminated()

    def is_free(self, num_unknown: int) -> bool:
        return self._answer is None and self._tracker.is_free(num_unknown)

    def go_on_behind(self, written: Sequence[int]) -> None:
        """Take in the beginning of the output, which somebody may have chosen: it need not keep the budget."""
        for token_id in written:
            self._accept(token_id)
            self._tracker.error = ""

    def finish_row(self, row: NDArray[np.uint32]) -> None:
        """Complete a row of the mask, for which `matcher`, if there is one, has filled in its part."""
        tracker = self._tracker
        if tracker.phase is ReasoningPhase.REASONING:
            row[:] = _EVERY_TOKEN
            for token_id in self._banned:
                row[token_id >> 5] &= _EVERY_TOKEN ^ (1 << (token_id & 31))
        elif self.matcher is None:
            row[:] = 0
        elif self._answer is not None:
            self._answer.finish_row(row)
        for token_id in tracker.next_tokens:
            row[token_id >> 5] |= 1 << (token_id & 31)

    def _accept(self, token_id: int) -> bool:
        tracker, answer = self._tracker, self._answer
        before = tracker.phase
        is_answer = tracker.take(token_id)
        if tracker.error:
            return False
        if answer is None:
            return True
        if is_answer:
            return self._fits and answer.accept_tokens([token_id])
        answer.pass_over(1)
        if tracker.phase is not before:
            answer.matcher.rollback(self._num_tried)
            self._fits, self._num_tried = True, 0
        elif before in (ReasoningPhase.BEFORE, ReasoningPhase.GAP):
            self._try(answer, token_id)
        if tracker.rest and self._tokenize is not None:
            rest = self._tokenize(tracker.rest)
            # They have been counted, as one token.
            answer.pass_over(-len(rest))
            return answer.accept_tokens(rest)
        return True

    def _try(self, answer: AnswerGrammar, token_id: int) -> None:
        """Let the answer's grammar take a token of an opening or a gap, in case the answer begins with it."""
        self._fits = self._fits and answer.matcher.try_consume_tokens([token_id]) == 1
        self._num_tried += self._fits


def thinking_grammar(
    marks: ReasoningTokens,
    params: SamplingParams,
    answer: AnswerGrammar | None,
    decode: Decode | None,
    tokenize: Callable[[str], list[int]] | None,
) -> ThinkingGrammar:
    """Return the grammar with which a request starts whose reasoning is marked.

    Raises:
        RequestError: the marks are incomplete.
    """
    sequences = [*marks.openings, *marks.endings, *marks.gaps]
    if not all(sequences) or not all(marks.ending_texts):
        raise RequestError("reasoning: a mark is empty")
    longest = max(map(len, [*sequences, *marks.ending_texts, marks.closing]))
    if longest > MAX_MARK:
        raise RequestError(f"reasoning: a mark has a length of {longest}, at most {MAX_MARK} is allowed")
    if not (marks.endings or marks.ending_texts):
        raise RequestError("reasoning: nothing ends it")
    if params.thinking_budget is not None and not marks.closing:
        raise RefusedArgumentError("thinking_budget", "thinking_budget: no tokens close the reasoning")
    banned = set(params.stop_token_ids)
    if params.eos_token_id is not None:
        banned.add(params.eos_token_id)
    tracker = ReasoningTracker(marks, params.thinking_budget, decode)
    return ThinkingGrammar(tracker, answer, sorted(banned.difference(marks.final_token_ids)), tokenize)
