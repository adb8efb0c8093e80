"""What the engine core returns, made into what callers see."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from nbengine.errors import InvalidArgumentError, RequestError
from nbengine.frontend.detokenizer import IncrementalDetokenizer
from nbengine.frontend.output_collector import RequestOutputCollector
from nbengine.frontend.pooling_state import PoolingStates
from nbengine.ipc.messages import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
)
from nbengine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.sampling_params import RequestOutputKind

_FINISH_REASONS = {reason: str(reason) for reason in FinishReason}


class RequestState:
    """What the frontend has to remember of a request to make its outputs."""

    __slots__ = (
        "_cumulative",
        "_num_sent_tokens",
        "_queued_at",
        "_stream_interval",
        "detokenizer",
        "external_req_id",
        "metrics",
        "num_cached_tokens",
        "output_kind",
        "prompt",
        "prompt_token_ids",
        "queue",
        "request_id",
    )

    def __init__(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        queue: RequestOutputCollector | None,
        tokenizer: Tokenizer | None,
        stream_interval: int,
    ) -> None:
        params = request.sampling_params
        if params is None:
            raise InvalidArgumentError("sampling_params", None, "given")
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.prompt = prompt
        self.prompt_token_ids = request.prompt_token_ids
        self.queue = queue
        self.output_kind = params.output_kind
        self.detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, params)
        self.num_cached_tokens = 0
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self._cumulative = params.output_kind is not RequestOutputKind.DELTA
        self._stream_interval = stream_interval
        self._num_sent_tokens = 0
        self._queued_at: float | None = None

    def update_from_output(self, output: EngineCoreOutput, now: float) -> None:
        """Take the figures of one engine core output into the request's metrics."""
        metrics = self.metrics
        num_new = len(output.new_token_ids)
        if num_new:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
            metrics.num_generation_tokens += num_new
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.events:
            self._note_events(output.events)

    def make_request_output(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None
    ) -> RequestOutput | None:
        """The output that is due now: none between intervals, and none before the end with `FINAL_ONLY`."""
        finished = finish_reason is not None
        token_ids = self.detokenizer.token_ids
        if not finished:
            if self.output_kind is RequestOutputKind.FINAL_ONLY:
                return None
            unsent = len(token_ids) - self._num_sent_tokens
            if self._num_sent_tokens and unsent < self._stream_interval:
                return None
        token_ids = token_ids.copy() if self._cumulative else token_ids[self._num_sent_tokens :]
        text = self.detokenizer.get_next_output_text(finished, not self._cumulative)
        self._num_sent_tokens = len(self.detokenizer.token_ids)
        completion = CompletionOutput(
            0,
            text,
            token_ids,
            None,
            None,
            None if finish_reason is None else _FINISH_REASONS[finish_reason],
            stop_reason if finished else None,
        )
        return RequestOutput(
            self.external_req_id,
            self.prompt,
            self.prompt_token_ids,
            [completion],
            finished,
            None,
            self.num_cached_tokens,
            self.metrics,
        )

    def _note_events(self, events: list[EngineCoreEvent]) -> None:
        for event in events:
            if event.type is EngineCoreEventType.QUEUED:
                self._queued_at = event.timestamp
            elif event.type is EngineCoreEventType.PREEMPTED:
                self.metrics.num_preemptions += 1
            elif self._queued_at is not None and self.metrics.queued_time is None:
                self.metrics.queued_time = event.timestamp - self._queued_at


@dataclass(slots=True)
class OutputProcessorOutput:
    """What one batch of engine core outputs came to, for requests without a collector and for the engine."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    pooling_outputs: list[PoolingRequestOutput[PoolingOutput]] = field(default_factory=list)
    errors: list[RequestError] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)
    """Requests that a stop string has ended here, but not yet in the engine core."""


class OutputProcessor:
    """The states of all unfinished requests, and the only loop over engine core outputs.

    For one thread at a time; only the collectors are shared with other threads.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, stream_interval: int = 1) -> None:
        self.request_states: dict[str, RequestState] = {}
        self.pooling = PoolingStates()
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._internal_ids: dict[str, list[str]] = {}

    def get_num_unfinished_requests(self) -> int:
        """How many requests have not had their last output."""
        return len(self.request_states) + len(self.pooling)

    def unfinished_ids(self) -> list[str]:
        """Internal ids of the requests that have not had their last output."""
        return [*self.request_states, *self.pooling.ids()]

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, queue: RequestOutputCollector | None = None
    ) -> None:
        """Register a request; to be called before the request is sent to the engine core.

        Raises:
            InvalidArgumentError: there is an unfinished request with the same internal id.
        """
        if request.request_id in self.request_states:
            raise InvalidArgumentError("request_id", request.request_id, "unused by unfinished requests")
        state = RequestState(request, prompt, queue, self._tokenizer, self._stream_interval)
        self.request_states[state.request_id] = state
        self._internal_ids.setdefault(state.external_req_id, []).append(state.request_id)

    def process_outputs(self, engine_core_outputs: Iterable[EngineCoreOutput]) -> OutputProcessorOutput:
        """Update metrics, detokenize, check for stop strings and hand out the outputs that are due.

        Outputs of requests with a collector go there, the others are returned. Outputs of requests that are not
        known any more (aborted) are dropped.
        """
        result = OutputProcessorOutput()
        states = self.request_states
        now = time.monotonic()
        for engine_core_output in engine_core_outputs:
            state = states.get(engine_core_output.request_id)
            if state is None:
                self._process_pooling(engine_core_output, result)
                continue
            finish_reason = engine_core_output.finish_reason
            if finish_reason is FinishReason.ERROR:
                self._fail(state, RequestError(_refusal(state, engine_core_output.error)), result)
                continue
            state.update_from_output(engine_core_output, now)
            stop_reason = engine_core_output.stop_reason
            stop_string = state.detokenizer.update(engine_core_output.new_token_ids, finish_reason)
            if stop_string is not None:
                if finish_reason is None:
                    result.reqs_to_abort.append(state.request_id)
                finish_reason, stop_reason = FinishReason.STOP, stop_string
            if finish_reason is not None:
                state.metrics.finished_time = now
                self._forget(state)
            request_output = state.make_request_output(finish_reason, stop_reason)
            if request_output is not None:
                if state.queue is not None:
                    state.queue.put(request_output)
                else:
                    result.request_outputs.append(request_output)
        return result

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests, given by either id, with `finish_reason="abort"` and the text they have.

        Returns the internal ids of those that were unfinished, for the engine core.
        """
        request_ids = list(request_ids)
        aborted = []
        for request_id in request_ids:
            internal_ids = [request_id] if request_id in self.request_states else None
            for internal_id in internal_ids or list(self._internal_ids.get(request_id, ())):
                self._abort(self.request_states[internal_id])
                aborted.append(internal_id)
        if len(self.pooling):
            aborted += self.pooling.abort(request_ids)
        return aborted

    def fail_requests(self, error: Exception) -> None:
        """End all requests with an error, for example because the engine is dead."""
        self.pooling.fail(error)
        for state in list(self.request_states.values()):
            self._forget(state)
            if state.queue is not None:
                state.queue.put_error(copy.copy(error))

    def _process_pooling(self, output: EngineCoreOutput, result: OutputProcessorOutput) -> None:
        outcome = self.pooling.process(output)
        if isinstance(outcome, RequestError):
            result.errors.append(outcome)
        elif outcome is not None:
            result.pooling_outputs.append(outcome)

    def _abort(self, state: RequestState) -> None:
        state.detokenizer.update([], FinishReason.ABORT)
        state.metrics.finished_time = time.monotonic()
        self._forget(state)
        request_output = state.make_request_output(FinishReason.ABORT, None)
        if request_output is not None and state.queue is not None:
            state.queue.put(request_output)

    def _fail(self, state: RequestState, error: RequestError, result: OutputProcessorOutput) -> None:
        self._forget(state)
        if state.queue is not None:
            state.queue.put_error(error)
        else:
            result.errors.append(error)

    def _forget(self, state: RequestState) -> None:
        del self.request_states[state.request_id]
        siblings = self._internal_ids[state.external_req_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self._internal_ids[state.external_req_id]


def _refusal(state: RequestState, error: str | None) -> str:
    return f"request {state.external_req_id}: {error or 'the engine refused it without a reason'}"
