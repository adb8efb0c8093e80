"""Pooling: from the hidden states of each prompt to one vector, one row of probabilities, or all states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.sampling_params import PoolingParams
from nbengine.scheduler.output import Fault, ModelRunnerOutput, SchedulerOutput
from nbengine.worker.batch.allocation import Allocations

_TINY = 1e-12
"""The least divisor of a normalisation, as in torch's `normalize`."""
_HEAD_TASKS = ("classify", "score")
_Finish = Callable[["NDArray[np.float32]", PoolingParams], "NDArray[np.float32]"]


class ClassificationHead(Protocol):
    """The method of a model with a classification head."""

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of hidden states [N, hidden]."""


@dataclass(slots=True)
class _PoolingState:
    """A pooling request between its steps; `row` is its row of the accumulator, while it runs."""

    params: PoolingParams
    num_tokens: int
    row: int | None
    num_computed: int = 0
    chunks: dict[int, Tensor] = field(default_factory=dict)
    """The hidden states so far, for "encode", by the position of their first token. They are on the host:
    there they are wanted, and a device has no room for those of long prompts."""


@dataclass(frozen=True, slots=True)
class _Span:
    """The tokens of a pooling request in one step: `start` to `end` of the flat batch, in which it is request
    number `position`."""

    req_id: str
    state: _PoolingState
    position: int
    start: int
    end: int
    begins: bool
    """True when the prompt's first token is among them."""
    ends: bool
    """True when the prompt's last token is among them."""

    @property
    def pooling(self) -> str | None:
        """Say which tokens' states are pooled; None keeps those of every token."""
        params = self.state.params
        return None if params.task == "encode" else params.pooling


@dataclass(frozen=True, slots=True)
class _Taken:
    """The additions of a step to the states of pooling requests."""

    chunks: list[tuple[_Span, Tensor]]
    """The hidden states of spans [tokens, hidden], on the host, for "encode"."""
    sums: list[tuple[Tensor, Tensor]]
    """Rows of the accumulator, int64 [rows], and what they become, float32 [rows, hidden]."""


@dataclass(frozen=True, slots=True)
class PooledStep:
    """The pooling requests that a step has completed, their results still on the device."""

    vectors: list[tuple[str, PoolingParams]]
    """The requests that have a row each in `pooled`."""
    pooled: Tensor | None
    """float32 [requests, hidden]"""
    heads: list[tuple[str, PoolingParams]]
    """The requests that have a row each in `logits`."""
    logits: Tensor | None
    """float32 [requests, num_labels]"""
    states: list[tuple[str, PoolingParams, list[Tensor]]]
    """The requests that get the hidden states of all tokens: chunks [tokens, hidden], on the host already."""

    def put_results(self, output: ModelRunnerOutput, allocations: Allocations) -> None:
        """Write each request's result, float32, into a step's output, or that it has NaN or infinity; wait
        for the device. Requests for which there is no room on the host are starved."""
        output.pooler_output = results = {}
        faults = {}
        for req_id, params, parts, finish in self._unfinished():
            with allocations.attempt() as attempt:
                array = torch.cat(parts).float().numpy()
                result = finish(array, params) if np.isfinite(array).all() else None
            if attempt.failed:
                allocations.starve([req_id])
            elif result is None:
                faults[req_id] = Fault.NOT_FINITE
            else:
                results[req_id] = result
        if faults:
            output.faults = {**(output.faults or {}), **faults}

    def _unfinished(self) -> Iterator[tuple[str, PoolingParams, list[Tensor], _Finish]]:
        """Yield what was computed for each request, in parts, on the host, and what is still to be done to
        it."""
        if self.pooled is not None:
            for (req_id, params), vector in zip(self.vectors, self.pooled.cpu(), strict=True):
                yield req_id, params, [vector], _finished_vector
        if self.logits is not None:
            for (req_id, params), row in zip(self.heads, self.logits.cpu(), strict=True):
                yield req_id, params, [row], _finished_logits
        for req_id, params, chunks in self.states:
            yield req_id, params, chunks, _finished_states


class Pooler:
    """The pooling requests among those that a runner executes.

    Sums over chunks are float32 and start again at 0 whenever a request's first token is computed, so that
    chunks,
    preemptions and the batch around a request change its result by no more than rounding.
    """

    def __init__(
        self,
        max_num_reqs: int,
        hidden_size: int,
        device: torch.device,
        head: ClassificationHead | None,
        allocations: Allocations | None = None,
    ) -> None:
        self._allocations = allocations or Allocations()
        self._head = head
        self._device = device
        self._shape = (max_num_reqs, hidden_size)
        self._sums = torch.zeros(self._shape, dtype=torch.float32, device=device)
        self._states: dict[str, _PoolingState] = {}
        self._free_rows = list(range(max_num_reqs))

    @property
    def is_idle(self) -> bool:
        """Return whether there is no pooling request."""
        return not self._states

    def update(self, plan: SchedulerOutput) -> None:
        """Take over from a plan which pooling requests come, go on and leave."""
        states = self._states
        if states:
            for req_id in plan.finished_req_ids & states.keys():
                self._release_row(states.pop(req_id))
            for req_id in plan.preempted_req_ids & states.keys():
                self._release_row(states[req_id])
            cached = plan.scheduled_cached_reqs
            for req_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
                state = states.get(req_id)
                if state is not None:
                    state.num_computed = num_computed
                    if state.row is None:
                        state.row = self._free_rows.pop()
        for new in plan.scheduled_new_reqs:
            if new.pooling_params is not None:
                states[new.req_id] = _PoolingState(
                    new.pooling_params, len(new.token_ids), self._free_rows.pop(), new.num_computed_tokens
                )

    def pool(self, hidden: Tensor, req_ids: Sequence[str], counts: Mapping[str, int]) -> PooledStep | None:
        """Take in a step's hidden states; return None when the step completes no pooling request.

        Args:
            hidden: [T, hidden size], the step's tokens, one request's after the other's; padding may follow.
            req_ids: the requests in that order, pooling and others.
            counts: the number of tokens that each request has in the step.
        """
        if not self._states:
            return None
        spans = self._advance(req_ids, counts)
        lengths = [counts[req_id] for req_id in req_ids]
        starved = self._allocations.each(partial(self._taken, hidden, lengths), spans, self._take_in)
        failed = {span.req_id for span in starved}
        self._allocations.starve(failed)
        done = [span for span in spans if span.ends and span.req_id not in failed]
        if not done:
            return None
        with self._allocations.attempt() as attempt:
            completed = self._completed(done)
        if not attempt.failed:
            return completed
        # A row for each was too much, so all are starved: none has asked for more than the others.
        self._allocations.starve(span.req_id for span in done)
        return None

    def rehearse(self, hidden: Tensor) -> None:
        """Do the most that a step can do, for its use of memory: every token's state is added up."""
        state = _PoolingState(PoolingParams(task="embed", pooling="mean"), len(hidden), 0)
        span = _Span("", state, 0, 0, len(hidden), begins=True, ends=True)
        self._take_in(self._taken(hidden, [len(hidden)], [span]))

    def _taken(self, hidden: Tensor, lengths: list[int], spans: list[_Span]) -> _Taken:
        """Compute what `_take_in` takes in of some of the step's requests; this changes nothing."""
        chunks = [
            (span, hidden[span.start : span.end].to("cpu", copy=True))
            for span in spans
            if span.pooling is None
        ]
        means = [span for span in spans if span.pooling == "mean"]
        sums = [*self._picked(hidden, spans), *(self._segments(hidden, lengths, means) if means else ())]
        return _Taken(chunks, sums)

    def _take_in(self, taken: _Taken) -> None:
        for span, chunk in taken.chunks:
            state = span.state
            if span.begins:
                state.chunks.clear()
            state.chunks[state.num_computed - (span.end - span.start)] = chunk
        for rows, values in taken.sums:
            self._sums[rows] = values

    def _advance(self, req_ids: Sequence[str], counts: Mapping[str, int]) -> list[_Span]:
        spans = []
        end = 0
        for position, req_id in enumerate(req_ids):
            count = counts[req_id]
            start, end = end, end + count
            state = self._states.get(req_id)
            if state is not None:
                begins = not state.num_computed
                state.num_computed += count
                ends = state.num_computed == state.num_tokens
                spans.append(_Span(req_id, state, position, start, end, begins, ends))
        return spans

    def _picked(self, hidden: Tensor, spans: list[_Span]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the states of first tokens for "cls" and of last ones for "last", with their rows."""
        picked = [(span.state.row, span.start) for span in spans if span.pooling == "cls" and span.begins]
        picked += [(span.state.row, span.end - 1) for span in spans if span.pooling == "last" and span.ends]
        if picked:
            rows, positions = torch.tensor(picked, dtype=torch.int64, device=self._device).unbind(1)
            yield rows, hidden[positions].float()

    def _segments(
        self, hidden: Tensor, lengths: list[int], spans: list[_Span]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the new sums of each request's states for "mean", with their rows."""
        if len(spans) == 1:
            # Cut out, it needs no sums over the other requests' tokens.
            (span,) = spans
            hidden, lengths = hidden[span.start : span.end], [span.end - span.start]
            spans = [replace(span, position=0)]
        lengths_here = torch.tensor(lengths, dtype=torch.int64, device=self._device)
        states = hidden[: sum(lengths)].float()
        segments = torch.segment_reduce(states, "sum", lengths=lengths_here, axis=0, unsafe=True)
        for begins in (True, False):
            chosen = [(s.state.row, s.position) for s in spans if s.begins is begins]
            if chosen:
                rows, positions = torch.tensor(chosen, dtype=torch.int64, device=self._device).unbind(1)
                yield rows, segments[positions] if begins else self._sums[rows] + segments[positions]

    def _completed(self, done: list[_Span]) -> PooledStep:
        sums = self._sums
        vectors = [span for span in done if span.state.params.task == "embed"]
        heads = [span for span in done if span.state.params.task in _HEAD_TASKS]
        states = [span for span in done if span.pooling is None]
        return PooledStep(
            [(span.req_id, span.state.params) for span in vectors],
            self._pooled(vectors, sums) if vectors else None,
            [(span.req_id, span.state.params) for span in heads],
            self._logits(heads, sums) if heads else None,
            [(span.req_id, span.state.params, list(span.state.chunks.values())) for span in states],
        )

    def _pooled(self, spans: list[_Span], sums: Tensor) -> Tensor:
        rows = torch.tensor([span.state.row for span in spans], dtype=torch.int64, device=self._device)
        divisors = [span.state.num_tokens if span.pooling == "mean" else 1 for span in spans]
        return sums[rows] / torch.tensor(divisors, dtype=torch.float32, device=self._device)[:, None]

    def _logits(self, spans: list[_Span], sums: Tensor) -> Tensor:
        if self._head is None:
            raise NBEngineError("the model has no classification head")
        return self._head.classify(self._pooled(spans, sums)).float()

    def _release_row(self, state: _PoolingState) -> None:
        if state.row is not None:
            self._free_rows.append(state.row)
        state.row = None
        state.chunks.clear()


def _finished_vector(vector: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    vector = vector[: params.dimensions]
    return _normalized(vector) if params.normalize else vector.copy()


def _finished_logits(row: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    return row if params.use_activation is False else _probabilities(row)


def _finished_states(states: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    return _normalized(states) if params.normalize else states


def _normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scale each vector (the last dimension) to length 1."""
    norms = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
    scaled: NDArray[np.float32] = vectors / np.maximum(norms, np.float32(_TINY))
    return scaled


def _probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the sigmoid of a single logit, the softmax of several."""
    if len(logits) == 1:
        return ((np.tanh(logits / 2) + 1) / 2).astype(np.float32)
    powers = np.exp(logits - logits.max())
    shares: NDArray[np.float32] = powers / powers.sum()
    return shares
