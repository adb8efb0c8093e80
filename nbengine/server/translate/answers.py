"""Answers as they come from the engine, divided into reasoning, content and calls, whatever API they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from nbengine.frontend.parsing.deltas import AnswerDelta, ContentDelta, ReasoningDelta, ToolCallEnded
from nbengine.outputs import CompletionOutput, Logprob, PromptProgress, RequestOutput, joined
from nbengine.server.protocol.errors import SERVER_ERROR, ApiError
from nbengine.server.translate.content_logprobs import ContentLogprobs, Entry
from nbengine.server.translate.usage import Usage


class Parser(Protocol):
    """The state machine that divides one answer."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Take in more text, and return what is certain of it."""

    def finish(self) -> list[AnswerDelta]:
        """Return what was held back, at the end of the answer."""


class PlainText:
    """The parser of answers that are nothing but content."""

    def feed(self, text: str) -> list[AnswerDelta]:
        """Return the text as content."""
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[AnswerDelta]:
        """Return nothing: no text is held back."""
        return []


class AnswerPart(msgspec.Struct, gc=False):
    """The new part of one completion; `index` counts completions, those of one prompt together.

    `finish_reason` is "stop", "length" or "tool_calls", None while more comes. The first part has `prompt_logprobs`
    where they are wanted. `logprobs` has an entry for each token, `content_logprobs` for each of the deltas those of the
    tokens of its content. A part with `prompt_progress` has nothing else: it comes before the answer.
    """

    index: int
    deltas: list[AnswerDelta]
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_progress: PromptProgress | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    content_logprobs: list[list[Entry]] | None = None


class _Choice:
    """One completion."""

    __slots__ = ("content_logprobs", "has_calls", "num_reasoning", "num_tokens", "parser")

    def __init__(self, parser: Parser, *, divides_logprobs: bool) -> None:
        self.parser = parser
        self.content_logprobs = ContentLogprobs(parser.feed) if divides_logprobs else None
        self.num_tokens = 0
        self.num_reasoning = 0
        self.has_calls = False

    def read(
        self, new: CompletionOutput, count_tokens: Callable[[str], int] | None
    ) -> tuple[list[AnswerDelta], list[list[Entry]] | None]:
        """Divide further text and its log probabilities, and take note of what it brings.

        Text that is all reasoning has as many tokens of it. Where there is other text, too, or a mark, or some is held
        back, `count_tokens` counts those of the reasoning: once, since a stream may be long.
        """
        text = new.text
        shares = None
        if self.content_logprobs is None:
            deltas = self.parser.feed(text) if text else []
        else:
            deltas, shares = self.content_logprobs.divide(text, new.logprobs or ())
        if new.finish_reason is not None:
            held = self.parser.finish()
            deltas = [*deltas, *held]
            if self.content_logprobs is not None and shares is not None:
                shares += self.content_logprobs.shares(held)
        num_tokens = len(new.token_ids)
        self.num_tokens += num_tokens
        reasoning = ""
        for delta in deltas:
            match delta:
                case ContentDelta():
                    pass
                case ReasoningDelta(text=thought):
                    reasoning += thought
                case ToolCallEnded():
                    self.has_calls = True
        if reasoning and count_tokens is not None:
            self.num_reasoning += num_tokens if reasoning == text else count_tokens(reasoning)
        return deltas, shares


class AnswerReader:
    """The state machine that makes parts of the outputs of one HTTP request.

    Args:
        make_parser: makes the parser of a completion.
        completions_per_prompt: `n`.
        copies: requests that each prompt was sent as; together they make `n` completions.
        count_tokens: counts the tokens of a text; None: reasoning is not counted.
        divides_logprobs: the parts have `content_logprobs`.
        has_prompt_logprobs: the first part of each completion has the prompt's log probabilities. The engine sends them
            with the first completion of a request, for which the others wait.
    """

    def __init__(
        self,
        make_parser: Callable[[], Parser] = PlainText,
        *,
        completions_per_prompt: int = 1,
        copies: int = 1,
        count_tokens: Callable[[str], int] | None = None,
        divides_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
    ) -> None:
        self._make_parser = make_parser
        self._per_request = completions_per_prompt // copies
        self._per_prompt = completions_per_prompt
        self._copies = copies
        self._count_tokens = count_tokens
        self._divides_logprobs = divides_logprobs
        self._has_prompt_logprobs = has_prompt_logprobs
        self._waiting: dict[int, list[RequestOutput]] = {}
        """The outputs of each request before the first completion has begun."""
        self._choices: dict[int, _Choice] = {}
        self._newest: dict[int, RequestOutput] = {}
        """The newest output for each prompt, of the first of its copies."""
        self.first_outputs: dict[int, RequestOutput] = {}
        """The first output for each prompt, which has the prompt."""

    def take(self, position: int, output: RequestOutput | PromptProgress) -> list[AnswerPart]:
        """Take in the newest output of the request at `position`: a delta, the whole, or the progress of its prompt,
        of which copies have no part of their own.

        Raises:
            ApiError: the request was ended by somebody else, so that the answer is not whole.
        """
        prompt, copy = divmod(position, self._copies)
        if isinstance(output, PromptProgress):
            index = prompt * self._per_prompt
            return [] if copy else [AnswerPart(index, [], [], prompt_progress=output)]
        first = prompt * self._per_prompt + copy * self._per_request
        if self._has_prompt_logprobs and first not in self._choices:
            waiting = self._waiting.setdefault(position, [])
            waiting.append(output)
            if all(completion.index for completion in output.outputs):
                return []
            output = joined(self._waiting.pop(position))
        if prompt not in self.first_outputs or output.prompt_logprobs is not None:
            self.first_outputs[prompt] = output
        if copy == 0:
            self._newest[prompt] = output
        parts = []
        for completion in output.outputs:
            index = first + completion.index
            prompt_logprobs = None
            choice = self._choices.get(index)
            if choice is None:
                choice = _Choice(self._make_parser(), divides_logprobs=self._divides_logprobs)
                self._choices[index] = choice
                prompt_logprobs = self.first_outputs[prompt].prompt_logprobs
            reason = completion.finish_reason
            if reason == "abort":
                raise ApiError(
                    503, SERVER_ERROR, "request_aborted", None, "the request was ended before its answer"
                )
            deltas, content_logprobs = choice.read(completion, self._count_tokens)
            if reason == "stop" and choice.has_calls:
                reason = "tool_calls"
            parts.append(
                AnswerPart(
                    index,
                    deltas,
                    completion.token_ids,
                    completion.logprobs,
                    reason,
                    completion.stop_reason,
                    prompt_logprobs=prompt_logprobs,
                    content_logprobs=content_logprobs,
                )
            )
        return parts

    def usage(self) -> Usage:
        """Return the tokens so far."""
        return Usage(
            sum(len(output.prompt_token_ids or ()) for output in self._newest.values()),
            sum(output.num_cached_tokens for output in self._newest.values()),
            sum(choice.num_tokens for choice in self._choices.values()),
            sum(choice.num_reasoning for choice in self._choices.values()),
        )
