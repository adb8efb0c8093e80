"""Several completions of one prompt: the engine core has a request for each of them, the caller has one."""

from __future__ import annotations

import copy

import msgspec

from nbengine.ipc.messages import EngineCoreRequest
from nbengine.outputs import RequestMetrics, RequestOutput, joined
from nbengine.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams


class ParentRequest:
    """A request with `n > 1`, whose children are its completions; they share the prompt's blocks by prefix
    caching.

    The child with index i has the id `{i}_{the parent's id}`, and the seed `seed + i` if there is one. Only
    the first is asked for the prompt's logprobs, which keep it from reading the prefix cache. The parent
    counts the tokens and preemptions of all children, but the cached tokens of the first alone: what the
    others find there is what the first has left.
    """

    __slots__ = (
        "_final_only",
        "_final_outputs",
        "_num_cached_tokens",
        "metrics",
        "num_unfinished",
        "request_id",
    )

    def __init__(self, request: EngineCoreRequest, params: SamplingParams) -> None:
        self.request_id = request.request_id
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.num_unfinished = params.n
        self._final_only = params.output_kind is RequestOutputKind.FINAL_ONLY
        self._num_cached_tokens = 0
        self._final_outputs: list[RequestOutput] = []

    def collect(self, delta: RequestOutput) -> RequestOutput | None:
        """Make a child's delta one of the parent's; with `FINAL_ONLY` all become one, when the last has
        come."""
        if delta.outputs[0].index == 0:
            self._num_cached_tokens = delta.num_cached_tokens
        delta.num_cached_tokens = self._num_cached_tokens
        delta.finished = self.num_unfinished == 0
        if not self._final_only:
            return delta
        self._final_outputs.append(delta)
        return joined(self._final_outputs) if delta.finished else None


def make_children(request: EngineCoreRequest, params: SamplingParams) -> list[EngineCoreRequest]:
    """Make the requests for the engine core that a parent stands for, by index."""
    return [_child(request, params, index) for index in range(params.n)]


def child_id(request_id: str, index: int) -> str:
    """Return the id under which the engine core knows the completion of that index."""
    return f"{index}_{request_id}"


def _child(request: EngineCoreRequest, params: SamplingParams, index: int) -> EngineCoreRequest:
    child_params = params.clone()
    child_params.n = 1
    if params.seed is not None:
        child_params.seed = (params.seed + index) % (MAX_SEED + 1)
    if index:
        child_params.prompt_logprobs = None
    child = copy.copy(request)
    child.request_id = child_id(request.request_id, index)
    child.sampling_params = child_params
    if request.transcript is not None:
        child.transcript = msgspec.structs.replace(request.transcript, index=index)
    return child
