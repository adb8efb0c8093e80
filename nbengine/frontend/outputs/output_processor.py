"""This module makes what callers see from what the engine core returns."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from nbengine.errors import InvalidArgumentError, RequestError
from nbengine.frontend.observability.request_watch import RequestWatch
from nbengine.frontend.outputs.divided_text import DividedText
from nbengine.frontend.outputs.logprobs import LogprobsProcessor, TokenTexts
from nbengine.frontend.outputs.output_collector import (
    PromptCallback,
    RequestOutputCollector,
    Waiter,
    wake,
)
from nbengine.frontend.outputs.parallel_sampling import ParentRequest, make_children
from nbengine.frontend.outputs.pooling_state import PoolingStates
from nbengine.frontend.outputs.request_state import RequestState
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.requests.continuation import Continuation
from nbengine.frontend.requests.request_errors import error_of
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.detokenizer import IncrementalDetokenizer
from nbengine.ipc.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    PromptRead,
)
from nbengine.outputs import RequestOutput
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput
from nbengine.sampling_params import SamplingParams


@dataclass(slots=True)
class OutputProcessorOutput:
    """The results of one batch of engine core outputs, for requests without a collector and for the
    engine."""

    request_outputs: list[RequestOutput] = field(default_factory=list)
    pooling_outputs: list[PoolingRequestOutput[PoolingOutput]] = field(default_factory=list)
    errors: list[RequestError] = field(default_factory=list)
    reqs_to_abort: list[str] = field(default_factory=list)
    """Requests that have ended here, but not yet in the engine core."""
    stopped: set[str] = field(default_factory=set)
    """Those of `reqs_to_abort` that a stop string has ended."""


class OutputProcessor:
    """The states of all unfinished requests, and the only loop over engine core outputs.

    For one thread at a time; only the collectors are shared with other threads.
    """

    def __init__(self, decoding: TextDecoding | None, *, stream_interval: int = 1) -> None:
        self.request_states: dict[str, RequestState] = {}
        self.watch = RequestWatch()
        self.pooling = PoolingStates(self.watch)
        self._decoding = decoding
        self._stream_interval = stream_interval
        self._groups: dict[str, dict[str, None]] = {}
        """Internal ids by an id that stands for several: the caller's, or that of a parent."""

    def get_num_unfinished_requests(self) -> int:
        """Count the requests that have not had their last output; each of `n` completions counts."""
        return len(self.request_states) + len(self.pooling)

    def unfinished_ids(self) -> list[str]:
        """Return the internal ids of the requests that have not had their last output."""
        return [*self.request_states, *self.pooling.ids()]

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        queue: RequestOutputCollector | None = None,
        continuation: Continuation | None = None,
        answer: AnswerReading | None = None,
        on_prompt_progress: PromptCallback | None = None,
    ) -> list[EngineCoreRequest]:
        """Register a request and return the requests that are then to be sent to the engine core: n of them
        with `n > 1`, and none where what is written of the answer already is its end. With `answer` its
        outputs have reasoning, content and calls. Without a `queue`, `process_prompts_read` calls
        `on_prompt_progress`.

        A pooling request is registered with `pooling.add` instead if a future waits for its outcome.

        Raises:
            InvalidArgumentError: there is an unfinished request with the same internal id.
        """
        params = request.sampling_params
        if request.pooling_params is not None and queue is None:
            self.pooling.add(request, prompt)
            return [request]
        if params is None:
            raise InvalidArgumentError("sampling_params", None, "given")
        if request.request_id in self.request_states or request.request_id in self._groups:
            raise InvalidArgumentError("request_id", request.request_id, "unused by unfinished requests")
        is_polled = queue is None
        external_id = request.external_req_id or request.request_id
        if queue is None:
            queue = RequestOutputCollector(params.output_kind, external_id, request.request_id)
            queue.on_prompt_progress = on_prompt_progress
        answer_params = params if continuation is None else continuation.params
        if answer is not None and answer.format.keeps_special_tokens:
            answer_params = msgspec.structs.replace(answer_params, skip_special_tokens=False)
        num_written = 0 if continuation is None else len(continuation.written)
        context = self._context_of(request, answer_params, num_written)
        if request.transcript is not None:
            request.transcript.context = self._context_of(request, params, num_written)
        parent = None if params.n == 1 else ParentRequest(request, params)
        requests = [request] if parent is None else make_children(request, params)
        for index, child in enumerate(requests):
            state = RequestState(
                child,
                params,
                prompt,
                queue,
                detokenizer=IncrementalDetokenizer.from_new_request(self._decoding, answer_params, context),
                logprobs=self._logprobs_processor(child.sampling_params or params, is_first=not context),
                stream_interval=self._stream_interval,
                answer=None if answer is None or not params.detokenize else DividedText(answer),
                is_polled=is_polled,
                parent=parent,
                index=index,
            )
            if index == 0:
                self.watch.begin(queue, request, params, prompt, state.metrics, queue.trace_headers)
            if continuation is not None and (end := state.begin_behind(continuation)) is not None:
                state.metrics.finished_time = time.monotonic()
                self.watch.completed(queue, str(end[0]), 0, is_last=True)
                if (delta := state.make_delta(*end)) is not None:
                    queue.put(delta)
                return []
            self.request_states[state.request_id] = state
            for group in _groups_of(state):
                self._groups.setdefault(group, {})[state.request_id] = None
        return requests

    def process_outputs(
        self, engine_core_outputs: Iterable[EngineCoreOutput], rank: int = 0
    ) -> OutputProcessorOutput:
        """Process what the engine core of this rank has sent: update metrics, detokenize, check for stop
        strings and hand out the outputs that are due.

        Outputs of requests with a collector go there, the others are returned. Outputs of requests that are
        not known any more (aborted) are dropped.
        """
        result = OutputProcessorOutput()
        waiters: list[Waiter] = []
        try:
            self._process(engine_core_outputs, rank, result, waiters)
        finally:
            # A reader that has an output is woken, also if a later output cannot be processed.
            if waiters:
                wake(waiters)
        return result

    def _process(
        self,
        engine_core_outputs: Iterable[EngineCoreOutput],
        rank: int,
        result: OutputProcessorOutput,
        waiters: list[Waiter],
    ) -> None:
        states = self.request_states
        polled: dict[RequestOutputCollector, None] = {}
        now = time.monotonic()
        for engine_core_output in engine_core_outputs:
            state = states.get(engine_core_output.request_id)
            if state is None:
                self._process_pooling(engine_core_output, result)
                continue
            finish_reason = engine_core_output.finish_reason
            stop_reason = engine_core_output.stop_reason
            stop_string = state.update_from_output(engine_core_output, rank, now)
            if stop_string is not None:
                if finish_reason is None:
                    result.reqs_to_abort.append(state.request_id)
                    result.stopped.add(state.request_id)
                finish_reason, stop_reason = FinishReason.STOP, stop_string
            if finish_reason is FinishReason.ERROR:
                delta = state.make_rest()
            else:
                if finish_reason is not None:
                    self._finish(state, now, finish_reason)
                delta = state.make_delta(finish_reason, stop_reason)
            if delta is not None:
                waiter = state.queue.add(delta)
                if waiter is not None:
                    waiters.append(waiter)
                elif state.is_polled:
                    polled[state.queue] = None
            if finish_reason is FinishReason.ERROR:
                self._fail(state, engine_core_output, result)
        for queue in polled:
            output = queue.get_nowait()
            if output is not None:
                result.request_outputs.append(output)

    def process_prompts_read(self, prompts_read: Iterable[PromptRead]) -> None:
        """Tell those who want to know how much of their prompts has been read.

        Raises:
            Exception: whatever the function of a request without a collector raises.
        """
        waiters = []
        for read in prompts_read:
            state = self.request_states.get(read.request_id)
            if state is None or not state.is_first:
                continue
            progress = state.update_from_prompt(read)
            if (waiter := state.queue.report(progress)) is not None:
                waiters.append(waiter)
            elif state.is_polled:
                state.queue.tell_progress()
        if waiters:
            wake(waiters)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests with `finish_reason="abort"` and the text they have.

        The ids are the callers', or internal ones; those of a request with `n > 1` stand for all its
        completions.

        Returns the internal ids of those that were unfinished, for the engine core.
        """
        request_ids = list(request_ids)
        aborted = []
        for request_id in request_ids:
            for internal_id in self._internal_ids(request_id):
                self._abort(self.request_states[internal_id])
                aborted.append(internal_id)
        if len(self.pooling):
            aborted += self.pooling.abort(request_ids)
        return aborted

    def discard_request(self, request_id: str) -> list[str]:
        """Forget a request that could not be sent, by its internal id; returns the ids as `abort_requests`
        does."""
        internal_ids = self._internal_ids(request_id)
        for internal_id in internal_ids:
            self.watch.forget(self.request_states[internal_id].queue)
            self._forget(self.request_states[internal_id])
        return internal_ids or self.pooling.discard(request_id)

    def fail_requests(self, error: Exception) -> None:
        """End all requests with an error, for example because the engine is dead."""
        self.pooling.fail(error)
        states = list(self.request_states.values())
        for state in states:
            self._forget(state)
        for queue in {state.queue for state in states}:
            self.watch.failed(queue, error, time.monotonic())
            queue.put_error(copy.copy(error))

    def _context_of(self, request: EngineCoreRequest, params: SamplingParams, num_written: int) -> list[int]:
        """Return the tokens of the prompt that decide how the text behind it begins; the last `num_written`
        ones of the request are the answer's."""
        prompt = request.prompt_token_ids
        if self._decoding is None or prompt is None:
            return []
        if num_written:
            prompt = prompt[:-num_written]
        return self._decoding.context_of(prompt, skip_special_tokens=params.skip_special_tokens)

    def _logprobs_processor(self, params: SamplingParams, *, is_first: bool) -> LogprobsProcessor | None:
        if params.logprobs is None and params.prompt_logprobs is None:
            return None
        texts = self._token_texts if params.detokenize else None
        looks_back = self._decoding is not None and self._decoding.looks_back
        return LogprobsProcessor(texts, params, is_first=is_first and looks_back)

    @functools.cached_property
    def _token_texts(self) -> TokenTexts | None:
        return None if self._decoding is None else TokenTexts(self._decoding.tokenizer)

    def _internal_ids(self, request_id: str) -> list[str]:
        return [request_id] if request_id in self.request_states else list(self._groups.get(request_id, ()))

    def _finish(self, state: RequestState, now: float, reason: FinishReason) -> None:
        self._forget(state)
        is_last = state.parent is None or not state.parent.num_unfinished
        if is_last:
            state.metrics.finished_time = now
        self.watch.completed(state.queue, str(reason), state.num_cached_tokens, is_last=is_last)

    def _process_pooling(self, output: EngineCoreOutput, result: OutputProcessorOutput) -> None:
        outcome = self.pooling.process(output)
        if isinstance(outcome, RequestError):
            result.errors.append(outcome)
        elif outcome is not None:
            result.pooling_outputs.append(outcome)

    def _abort(self, state: RequestState) -> None:
        state.detokenizer.update([], FinishReason.ABORT)
        self._finish(state, time.monotonic(), FinishReason.ABORT)
        delta = state.make_delta(FinishReason.ABORT, None)
        if delta is not None:
            state.queue.put(delta)

    def _fail(self, state: RequestState, output: EngineCoreOutput, result: OutputProcessorOutput) -> None:
        """End a request that the engine refused or lost; with `n > 1` no completion comes without the
        others."""
        whole = state if state.parent is None else state.parent
        for request_id in self._internal_ids(whole.request_id):
            self._forget(self.request_states[request_id])
            if request_id != state.request_id:
                result.reqs_to_abort.append(request_id)
        error = error_of(output, state.external_req_id)
        self.watch.failed(state.queue, error, time.monotonic())
        if state.is_polled:
            result.errors.append(error)
        else:
            state.queue.put_error(error)

    def _forget(self, state: RequestState) -> None:
        del self.request_states[state.request_id]
        if state.parent is not None:
            state.parent.num_unfinished -= 1
        for group in _groups_of(state):
            members = self._groups[group]
            del members[state.request_id]
            if not members:
                del self._groups[group]


def _groups_of(state: RequestState) -> set[str]:
    ids = {state.external_req_id}
    if state.parent is not None:
        ids.add(state.parent.request_id)
    return ids
