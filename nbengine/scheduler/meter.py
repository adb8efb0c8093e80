"""The meter of a scheduler's requests, which counts at two moments of each: its first token and its end."""

from __future__ import annotations

from nbengine.ipc.messages import FinishReason
from nbengine.metrics.requests import RequestStats
from nbengine.scheduler.phases import StepPhases
from nbengine.scheduler.request import FINISH_REASONS, Request


class RequestMeter:
    """The figures of a scheduler's requests. The tokens between the first and the last cost nothing."""

    __slots__ = ("has_news", "num_generation_tokens", "num_prompt_tokens", "phases", "stats")

    def __init__(self) -> None:
        self.stats = RequestStats()
        self.num_prompt_tokens = 0
        """Tokens of the prompts that have been computed or found, since the start."""
        self.num_generation_tokens = 0
        """Tokens sampled, since the start; the scheduler counts them, a step's at once."""
        self.has_news = False
        """True if `stats` has changed since `take` was called."""
        self.phases = StepPhases()

    def first_token(self, request: Request, now: float) -> None:
        """Count a request that has its first token at `now`, on the scheduler's clock."""
        self.has_news = True
        stats = self.stats
        request.first_token_at = now
        self.num_prompt_tokens += request.num_prompt_tokens
        stats.time_to_first_token.observe(now - request.received_at)
        self._begun(request, now)

    def ended(self, request: Request, now: float) -> None:
        """Count a request that has just ended, with its last status."""
        self.has_news = True
        stats = self.stats
        reason = FinishReason.STOP if request.has_stop_string else FINISH_REASONS[request.status]
        stats.finished[reason] += 1
        stats.e2e_latency.observe(now - request.received_at)
        stats.prompt_tokens.observe(request.num_prompt_tokens)
        if request.pooling_params is not None:
            if reason is FinishReason.STOP:
                self.num_prompt_tokens += request.num_prompt_tokens
                self._begun(request, now)
            return
        num_tokens = request.num_output_tokens
        stats.generation_tokens.observe(num_tokens)
        if num_tokens:
            decode_time = now - request.first_token_at
            stats.decode_time.observe(decode_time)
            if num_tokens > 1:
                stats.inter_token_latency.observe(decode_time / (num_tokens - 1), num_tokens - 1)

    def take(self) -> RequestStats:
        """Return a copy of `stats`, which has no news any more."""
        self.has_news = False
        return self.stats.copy()

    def _begun(self, request: Request, now: float) -> None:
        self.stats.queue_time.observe(request.scheduled_at - request.received_at)
        self.stats.prefill_time.observe(now - request.scheduled_at)
