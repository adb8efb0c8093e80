"""What callers get back from the engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request. All are seconds of `time.monotonic()` on the machine of the frontend."""

    arrival_time: float = 0.0
    queued_time: float | None = None
    """Seconds spent waiting in the engine before the first token was scheduled."""
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def inter_token_latency(self) -> float | None:
        """Mean seconds between two tokens, None with fewer than two."""
        if self.first_token_time is None or self.last_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)


@dataclass(slots=True)
class Logprob:
    """Log probability (natural) of one token at one position.

    `rank` counts from 1, the most likely token; `decoded_token` is None with `detokenize=False`.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion of a request.

    `finish_reason` is None while the request runs, then "stop", "length" or "abort"; `stop_reason` is
    the stop string or stop token id that ended it, None for the end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """The state of a request as its caller sees it; `outputs` has one entry a completion."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def add(self, newer: RequestOutput, *, aggregate: bool) -> None:
        """Merge a newer output of the same request into this one, in place.

        With `aggregate` the outputs are deltas, which are concatenated; otherwise the newer replaces.
        """
        self.finished |= newer.finished
        self.num_cached_tokens = newer.num_cached_tokens
        self.metrics = newer.metrics
        for new in newer.outputs:
            for position, old in enumerate(self.outputs):
                if old.index == new.index:
                    self.outputs[position] = _joined(old, new) if aggregate else new
                    break
            else:
                self.outputs.append(new)


def _joined(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    logprobs = old.logprobs
    if new.logprobs:
        logprobs = [*(old.logprobs or []), *new.logprobs]
    return CompletionOutput(
        index=old.index,
        text=old.text + new.text,
        token_ids=[*old.token_ids, *new.token_ids],
        cumulative_logprob=new.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=new.finish_reason,
        stop_reason=new.stop_reason,
    )
