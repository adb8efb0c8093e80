"""The outputs that callers get back from the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

SHORTEST_SPAN = 0.02
"""Seconds that a request's tokens must span for a speed to be made of them."""


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """The part of a prompt that the engine has read, after a step that has not read all of it.

    Of `num_prompt_tokens` tokens, `num_read_tokens` have keys and values, `num_cached_tokens` of them from the prefix
    cache. `seconds` is the time since the engine took up the request. As text it is a line for people.
    """

    request_id: str
    num_prompt_tokens: int
    num_read_tokens: int
    num_cached_tokens: int
    seconds: float
    seconds_left: float | None = None
    """An estimate of the seconds to the first token; None before there is one."""

    def __str__(self) -> str:
        parts = [f"reading {self.num_read_tokens:,} of {self.num_prompt_tokens:,} tokens"]
        if self.num_cached_tokens:
            parts.append(f"{self.num_cached_tokens:,} reused")
        if self.seconds_left is not None:
            parts.append(f"{math.ceil(self.seconds_left):,} s to go")
        return ", ".join(parts)


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, and the engine cores that computed it.

    Times are seconds of `time.monotonic()` on the machine of the frontend.
    """

    arrival_time: float = 0.0
    queued_time: float | None = None
    """Seconds spent waiting in the engine before the first token was scheduled."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0
    data_parallel_ranks: tuple[int, ...] = ()
    """The engine cores that compute the request: with `n > 1` those of all completions, in the order of their
    first outputs."""
    prompt_progress: PromptProgress | None = None
    """The latest progress of a prompt that takes several steps; None where one step reads it. With `n > 1` that
    of the first completion."""

    @property
    def time_to_first_token(self) -> float | None:
        """Return the seconds from arrival to the first token, None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def inter_token_latency(self) -> float | None:
        """Return the mean seconds between two tokens, None with fewer than two."""
        if self.first_token_time is None or self.last_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second after the first one, None if they span less than `SHORTEST_SPAN`.

        Tokens that came in one message show how fast it was read, not how fast the engine is.
        """
        latency = self.inter_token_latency
        if latency is None or latency * (self.num_generation_tokens - 1) < SHORTEST_SPAN:
            return None
        return 1 / latency


# Every step makes two of these per request: structs take less than half of a dataclass's time to make, and
# the garbage collector need not look at them, since they never refer back to what holds them.


class Logprob(msgspec.Struct, gc=False):
    """Log probability (natural) of one token at one position.

    `rank` counts from 1, the most likely token; `decoded_token` is None with `detokenize=False`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool that a model has written; `arguments` is the JSON text of an object."""

    id: str
    name: str
    arguments: str


class UnreadableCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool that a model has begun, and that is none: its text with all markers, and the reason, a part of a
    sentence such as "its arguments cannot be read: …"."""

    text: str
    reason: str


class CompletionOutput(msgspec.Struct, gc=False):
    """One completion of a request.

    `text` is all that the model has written. Where its format is known (`LLM.chat`), `reasoning` and
    `content` are the parts of it, without markers, and `tool_calls` the calls that are complete; in a delta
    they are what is new. `reasoning` and `content` are None if nobody looks for them. A call that cannot be
    read is a part of the content, and `unreadable_calls` says why.

    `finish_reason` is None while the request runs, then "stop", "length" or "abort"; `stop_reason` is the
    stop string or stop token id that ended it, None for the end-of-sequence token. `token_ids` end with the
    token that completed a stop string. `logprobs` has one entry per token, which begins with the token
    itself, and `cumulative_logprob` is the sum over the tokens so far, also in a delta; both are None unless
    asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = []
    unreadable_calls: list[UnreadableCall] = []

    @property
    def finished(self) -> bool:
        """Tell whether the completion has ended, so that nothing more will come."""
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, gc=False):
    """The state of a request as its caller sees it, not to be changed: later outputs are built from it.

    `outputs` has one entry, by index, for each completion that has begun; in a delta, for each one that has
    something new.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry per prompt token, None for the first, if asked for; of a stream's deltas only one has it."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache; with `n > 1`, for the first
    completion."""
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Join outputs of one request, the first one and then deltas in their order, into one that says the same.

    The given outputs stay as they are; the result may share parts with them.
    """
    completions: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for completion in output.outputs:
            completions.setdefault(completion.index, []).append(completion)
    prompt_logprobs = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    last = outputs[-1]
    return RequestOutput(
        last.request_id,
        last.prompt,
        last.prompt_token_ids,
        [_joined_completion(completions[index]) for index in sorted(completions)],
        last.finished,
        prompt_logprobs[0] if prompt_logprobs else None,
        last.num_cached_tokens,
        last.metrics,
    )


def _joined_completion(parts: list[CompletionOutput]) -> CompletionOutput:
    last = parts[-1]
    if len(parts) == 1:
        return last
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None if last.logprobs is None else []
    for part in parts:
        token_ids += part.token_ids
        if logprobs is not None:
            logprobs += part.logprobs or ()
    whole = CompletionOutput(
        last.index,
        "".join([part.text for part in parts]),
        token_ids,
        last.cumulative_logprob,
        logprobs,
        last.finish_reason,
        last.stop_reason,
    )
    if last.content is not None:
        if last.reasoning is not None:
            whole.reasoning = "".join([part.reasoning or "" for part in parts])
        whole.content = "".join([part.content or "" for part in parts])
        whole.tool_calls = [call for part in parts for call in part.tool_calls]
        whole.unreadable_calls = [call for part in parts for call in part.unreadable_calls]
    return whole
