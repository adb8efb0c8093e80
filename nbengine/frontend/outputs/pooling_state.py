"""The frontend's side of unfinished pooling requests: each has one outcome, and nothing comes before it."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from nbengine.errors import InvalidArgumentError, RequestAbortedError, RequestError
from nbengine.frontend.observability.request_watch import RequestWatch
from nbengine.frontend.requests.request_errors import error_of
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from nbengine.outputs import RequestMetrics
from nbengine.pooling_outputs import PoolingOutput, PoolingRequestOutput

PoolingFuture = Future[PoolingRequestOutput[PoolingOutput]]


@dataclass(frozen=True, slots=True)
class _PoolingState:
    request_id: str
    external_req_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    future: PoolingFuture | None
    """The future that waits for the outcome; None if the caller of `step` gets it."""
    metrics: RequestMetrics


class PoolingStates:
    """Unfinished pooling requests by their internal id. For one thread; only the futures are shared with
    others."""

    def __init__(self, watch: RequestWatch | None = None) -> None:
        self._watch = watch or RequestWatch()
        self._states: dict[str, _PoolingState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def ids(self) -> list[str]:
        """Return the internal ids."""
        return list(self._states)

    def add(
        self, request: EngineCoreRequest, prompt: str | None, future: PoolingFuture | None = None
    ) -> None:
        """Register a request; to be called before the request is sent to the engine core.

        Raises:
            InvalidArgumentError: there is an unfinished request with the same internal id.
        """
        if request.request_id in self._states:
            raise InvalidArgumentError("request_id", request.request_id, "unused by unfinished requests")
        metrics = RequestMetrics(request.arrival_time)
        if request.pooling_params is not None:
            self._watch.begin(request.request_id, request, request.pooling_params, prompt, metrics, None)
        self._states[request.request_id] = _PoolingState(
            request.request_id,
            request.external_req_id or request.request_id,
            prompt,
            request.prompt_token_ids or [],
            future,
            metrics,
        )

    def discard(self, request_id: str) -> list[str]:
        """Forget a request that could not be sent, by its internal id; returns the id if there was one."""
        self._watch.forget(request_id)
        return [] if self._states.pop(request_id, None) is None else [request_id]

    def process(self, output: EngineCoreOutput) -> PoolingRequestOutput[PoolingOutput] | RequestError | None:
        """Take in what the engine core returned for a request that may be one of these.

        Return what the caller of `step` gets: the outcome, or the error that says why there is none.
        """
        state = self._states.pop(output.request_id, None)
        if state is None:
            return None
        outcome: PoolingRequestOutput[PoolingOutput] | RequestError
        if output.finish_reason is FinishReason.ERROR or output.pooling_output is None:
            outcome = error_of(output, state.external_req_id)
            self._watch.failed(state.request_id, outcome, time.monotonic())
        else:
            state.metrics.finished_time = time.monotonic()
            self._watch.completed(state.request_id, "stop", output.num_cached_tokens, is_last=True)
            outcome = PoolingRequestOutput(
                state.external_req_id,
                PoolingOutput(output.pooling_output),
                state.prompt_token_ids,
                num_cached_tokens=output.num_cached_tokens,
                prompt=state.prompt,
            )
        if state.future is None:
            return outcome
        _resolve(state.future, outcome)
        return None

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests, given by either id; those that wait for one get a `RequestAbortedError`.

        Returns the internal ids of those that were unfinished.
        """
        wanted = set(request_ids)
        aborted = [
            s for s in self._states.values() if not wanted.isdisjoint((s.request_id, s.external_req_id))
        ]
        for state in aborted:
            del self._states[state.request_id]
            state.metrics.finished_time = time.monotonic()
            self._watch.completed(state.request_id, "abort", 0, is_last=True)
            if state.future is not None:
                _resolve(state.future, RequestAbortedError(f"request {state.external_req_id} was aborted"))
        return [state.request_id for state in aborted]

    def fail(self, error: Exception) -> None:
        """End all requests with an error, for example because the engine is dead."""
        states, self._states = self._states, {}
        for state in states.values():
            self._watch.failed(state.request_id, error, time.monotonic())
            if state.future is not None:
                _resolve(state.future, copy.copy(error))


def _resolve(future: PoolingFuture, outcome: PoolingRequestOutput[PoolingOutput] | Exception) -> None:
    # Setting the outcome of a future that its reader has cancelled would be an error.
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
