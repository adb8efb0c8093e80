"""The state of a request that the frontend keeps while the request runs."""

from __future__ import annotations

from nbengine.frontend.outputs.divided_text import DividedText
from nbengine.frontend.outputs.logprobs import LogprobsProcessor
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.outputs.parallel_sampling import ParentRequest
from nbengine.frontend.requests.continuation import Continuation
from nbengine.frontend.text.detokenizer import IncrementalDetokenizer
from nbengine.ipc.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    PromptRead,
)
from nbengine.outputs import CompletionOutput, PromptProgress, RequestMetrics, RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams

_FINISH_REASONS = {reason: str(reason) for reason in FinishReason}


class RequestState:
    """The state that the frontend keeps of a request of the engine core, which is one completion.

    `is_polled` says that nobody waits on `queue`: `process_outputs` returns what is in it.
    """

    __slots__ = (
        "_answer",
        "_final_only",
        "_index",
        "_num_sent_tokens",
        "_queued_at",
        "_stream_interval",
        "detokenizer",
        "external_req_id",
        "is_polled",
        "logprobs",
        "metrics",
        "num_cached_tokens",
        "parent",
        "prompt",
        "prompt_token_ids",
        "queue",
        "request_id",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        prompt: str | None,
        queue: RequestOutputCollector,
        *,
        detokenizer: IncrementalDetokenizer,
        logprobs: LogprobsProcessor | None,
        stream_interval: int,
        answer: DividedText | None = None,
        is_polled: bool,
        parent: ParentRequest | None,
        index: int,
    ) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.queue = queue
        self.is_polled = is_polled
        self.parent = parent
        self.detokenizer = detokenizer
        self.logprobs = logprobs
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(request.arrival_time) if parent is None else parent.metrics
        self._answer = answer
        self._final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._index = index
        self._stream_interval = stream_interval
        self._num_sent_tokens = 0
        self._queued_at: float | None = None

    def begin_behind(self, continuation: Continuation) -> tuple[FinishReason, int | str | None] | None:
        """Take in what is written of the answer already, whose tokens are not handed out; return the finish
        reason and the stop reason if that has ended the request."""
        end = continuation.end()
        stop_string = self.detokenizer.update(continuation.written, None if end is None else end[0])
        self._num_sent_tokens = len(self.detokenizer.token_ids)
        if self.logprobs is not None:
            self.logprobs.begin_behind(continuation.written)
        return end if stop_string is None else (FinishReason.STOP, stop_string)

    def update_from_output(self, output: EngineCoreOutput, rank: int, now: float) -> str | None:
        """Take in tokens, their logprobs and figures from the engine core of this rank; return the stop
        string that the tokens completed, if any."""
        new_token_ids = output.new_token_ids
        stop_string = self.detokenizer.update(new_token_ids, output.finish_reason)
        metrics = self.metrics
        num_new = len(new_token_ids)
        if stop_string is not None:
            num_new -= self.detokenizer.num_dropped_tokens
        if num_new:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
            metrics.num_generation_tokens += num_new
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.events is not None:
            self._note_events(output.events, rank)
        if self.logprobs is not None:
            if output.new_prompt_logprobs is not None:
                self.logprobs.update_prompt(output.new_prompt_logprobs, self.prompt_token_ids)
            if output.new_logprobs is not None:
                self.logprobs.update(output.new_logprobs, num_new)
        return stop_string

    @property
    def is_first(self) -> bool:
        """Tell whether this is the first completion of its request."""
        return self._index == 0

    def update_from_prompt(self, read: PromptRead) -> PromptProgress:
        """Take in how much of the prompt the engine core has read."""
        progress = self.metrics.prompt_progress = PromptProgress(
            self.external_req_id,
            read.num_prompt_tokens,
            read.num_read_tokens,
            read.num_cached_tokens,
            read.seconds,
            _seconds_left(read, self.metrics.prompt_progress),
        )
        return progress

    def make_delta(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """Return the output that is due now: none between intervals, and none before the end with
        `FINAL_ONLY`."""
        detokenizer = self.detokenizer
        token_ids = detokenizer.token_ids
        num_sent = self._num_sent_tokens
        finished = finish_reason is not None
        # The first token is due at once, whatever the interval.
        if not finished and (
            self._final_only or (num_sent and len(token_ids) - num_sent < self._stream_interval)
        ):
            return None
        self._num_sent_tokens = len(token_ids)
        logprobs = self.logprobs
        completion = CompletionOutput(
            self._index,
            detokenizer.take_text(finished),
            token_ids[num_sent:],
            None if logprobs is None else logprobs.cumulative_logprob,
            None if logprobs is None else logprobs.take(),
            None if finish_reason is None else _FINISH_REASONS[finish_reason],
            stop_reason,
        )
        if self._answer is not None:
            self._answer.divide(completion)
        delta = RequestOutput(
            self.external_req_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            finished,
            None if logprobs is None else logprobs.take_prompt(),
            self.num_cached_tokens,
            self.metrics,
        )
        return delta if self.parent is None else self.parent.collect(delta)

    def make_rest(self) -> RequestOutput | None:
        """Return what has not been handed out of a request that an error ends, None if there is nothing; with
        `FINAL_ONLY` nothing is handed out."""
        if self._final_only:
            return None
        rest = self.make_delta(FinishReason.ERROR, None)
        if rest is None or not (rest.outputs[0].token_ids or rest.outputs[0].text):
            return None
        # The reader takes it as one of many, and goes on to the error.
        rest.finished, rest.outputs[0].finish_reason = False, None
        return rest

    def _note_events(self, events: list[EngineCoreEvent], rank: int) -> None:
        # A request's first output has events, so that nothing need be noted with each token.
        if rank not in self.metrics.data_parallel_ranks:
            self.metrics.data_parallel_ranks += (rank,)
        for event in events:
            if event.type is EngineCoreEventType.QUEUED:
                self._queued_at = event.timestamp
            elif event.type is EngineCoreEventType.PREEMPTED:
                self.metrics.num_preemptions += 1
            elif self._queued_at is not None and self.metrics.queued_time is None:
                self.metrics.queued_time = event.timestamp - self._queued_at


def _seconds_left(read: PromptRead, before: PromptProgress | None) -> float | None:
    """Estimate the time for the rest of a prompt.

    A token takes a time that grows with its position, because of attention: of n tokens an average of a + b n. The
    latest step and all before it give a and b; the first step alone gives an average.
    """
    num_left = read.num_prompt_tokens - read.num_read_tokens
    num_computed = read.num_read_tokens - read.num_cached_tokens
    if num_computed <= 0:
        return None
    average = read.seconds / num_computed
    # After a preemption less may have been read than before.
    if before is None or not read.num_cached_tokens < before.num_read_tokens < read.num_read_tokens:
        return num_left * average
    latest = (read.seconds - before.seconds) / (read.num_read_tokens - before.num_read_tokens)
    growth = max(0.0, (latest - average) / (before.num_read_tokens - read.num_cached_tokens))
    return num_left * (latest + growth * (read.num_prompt_tokens - before.num_read_tokens))
