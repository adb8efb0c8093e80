"""Pooling: from the hidden states of prompts to one vector, one row of probabilities, or all states of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.sampling_params import PoolingParams
from nbengine.scheduler.output import SchedulerOutput

_TINY = 1e-12
"""Least divisor of a normalisation, as in torch's `normalize`."""
_HEAD_TASKS = ("classify", "score")


class ClassificationHead(Protocol):
    """What a model with a classification head offers."""

    def classify(self, hidden: Tensor) -> Tensor:
        """Logits [N, num_labels] of hidden states [N, hidden]."""


@dataclass(slots=True)
class _PoolingState:
    """A pooling request between its steps; `row` is its row of the accumulator, while it runs."""

    params: PoolingParams
    num_tokens: int
    row: int | None
    num_computed: int = 0
    chunks: list[Tensor] = field(default_factory=list)
    """For "encode": the hidden states so far."""


@dataclass(frozen=True, slots=True)
class _Span:
    """A pooling request's tokens in one step: `start` to `end` of the flat batch, the `position`-th request of it."""

    req_id: str
    state: _PoolingState
    position: int
    start: int
    end: int
    begins: bool
    """The prompt's first token is among them."""
    ends: bool
    """The prompt's last token is among them."""

    @property
    def pooling(self) -> str | None:
        """Which tokens' states are pooled; None keeps those of every token."""
        params = self.state.params
        return None if params.task == "encode" else params.pooling


@dataclass(frozen=True, slots=True)
class PooledStep:
    """The pooling requests that a step has completed, their results still on the device."""

    vectors: list[tuple[str, PoolingParams]]
    """Those with a row each in `pooled`."""
    pooled: Tensor | None
    """float32 [requests, hidden]"""
    heads: list[tuple[str, PoolingParams]]
    """Those with a row each in `logits`."""
    logits: Tensor | None
    """float32 [requests, num_labels]"""
    states: list[tuple[str, PoolingParams, Tensor]]
    """Those that get the hidden states of all tokens, [tokens, hidden]."""

    def results(self) -> dict[str, NDArray[np.float32]]:
        """Wait for the device and return the result of each request, float32."""
        results: dict[str, NDArray[np.float32]] = {}
        if self.pooled is not None:
            for (req_id, params), vector in zip(self.vectors, self.pooled.cpu().numpy(), strict=True):
                results[req_id] = _finished_vector(vector, params)
        if self.logits is not None:
            for (req_id, params), row in zip(self.heads, self.logits.cpu().numpy(), strict=True):
                results[req_id] = row if params.use_activation is False else _probabilities(row)
        for req_id, params, hidden in self.states:
            states = hidden.float().cpu().numpy()
            results[req_id] = _normalized(states) if params.normalize else states
        return results


class Pooler:
    """The pooling requests among those that a runner executes.

    Sums over chunks are float32 and start anew whenever a request's first token is computed, so that chunks,
    preemptions and the batch around a request change its result by no more than rounding.
    """

    def __init__(
        self, max_num_reqs: int, hidden_size: int, device: torch.device, head: ClassificationHead | None
    ) -> None:
        self._head = head
        self._device = device
        self._shape = (max_num_reqs, hidden_size)
        self._sums: Tensor | None = None
        self._states: dict[str, _PoolingState] = {}
        self._free_rows = list(range(max_num_reqs))

    @property
    def is_idle(self) -> bool:
        """Whether there is no pooling request."""
        return not self._states

    def update(self, plan: SchedulerOutput) -> None:
        """Take over which pooling requests come, go on and leave."""
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
        """Take in a step's hidden states; None when it completes no pooling request.

        Args:
            hidden: [T, hidden size], the step's tokens, one request's after the other's; padding may follow.
            req_ids: the requests in that order, pooling and others.
            counts: how many tokens each has in the step.
        """
        if not self._states:
            return None
        spans = self._advance(req_ids, counts)
        if self._sums is None:
            self._sums = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        self._pick(hidden, spans, self._sums)
        if any(span.pooling == "mean" for span in spans):
            lengths = [counts[req_id] for req_id in req_ids]
            self._add_segments(hidden[: sum(lengths)], lengths, spans, self._sums)
        for span in spans:
            if span.pooling is None:
                span.state.chunks = [] if span.begins else span.state.chunks
                span.state.chunks.append(hidden[span.start : span.end].clone())
        done = [span for span in spans if span.ends]
        return self._completed(done, self._sums) if done else None

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

    def _pick(self, hidden: Tensor, spans: list[_Span], sums: Tensor) -> None:
        """Take the states of first tokens for "cls" and of last ones for "last"."""
        picked = [(span.state.row, span.start) for span in spans if span.pooling == "cls" and span.begins]
        picked += [(span.state.row, span.end - 1) for span in spans if span.pooling == "last" and span.ends]
        if picked:
            rows, positions = torch.tensor(picked, device=self._device).unbind(1)
            sums[rows] = hidden[positions].float()

    def _add_segments(self, hidden: Tensor, lengths: list[int], spans: list[_Span], sums: Tensor) -> None:
        """Add up each request's states for "mean"."""
        lengths_here = torch.tensor(lengths, device=self._device)
        segments = torch.segment_reduce(hidden.float(), "sum", lengths=lengths_here, axis=0, unsafe=True)
        for begins in (True, False):
            chosen = [(s.state.row, s.position) for s in spans if s.pooling == "mean" and s.begins is begins]
            if chosen:
                rows, positions = torch.tensor(chosen, device=self._device).unbind(1)
                sums[rows] = segments[positions] if begins else sums[rows] + segments[positions]

    def _completed(self, done: list[_Span], sums: Tensor) -> PooledStep:
        vectors = [span for span in done if span.state.params.task == "embed"]
        heads = [span for span in done if span.state.params.task in _HEAD_TASKS]
        states = [span for span in done if span.pooling is None]
        return PooledStep(
            [(span.req_id, span.state.params) for span in vectors],
            self._pooled(vectors, sums) if vectors else None,
            [(span.req_id, span.state.params) for span in heads],
            self._logits(heads, sums) if heads else None,
            [(span.req_id, span.state.params, torch.cat(span.state.chunks)) for span in states],
        )

    def _pooled(self, spans: list[_Span], sums: Tensor) -> Tensor:
        rows = torch.tensor([span.state.row for span in spans], device=self._device)
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
        state.chunks = []


def _finished_vector(vector: NDArray[np.float32], params: PoolingParams) -> NDArray[np.float32]:
    vector = vector[: params.dimensions]
    return _normalized(vector) if params.normalize else vector.copy()


def _normalized(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each vector (the last dimension) scaled to length 1."""
    norms = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
    scaled: NDArray[np.float32] = vectors / np.maximum(norms, np.float32(_TINY))
    return scaled


def _probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sigmoid of a single logit, softmax of several."""
    if len(logits) == 1:
        return ((np.tanh(logits / 2) + 1) / 2).astype(np.float32)
    powers = np.exp(logits - logits.max())
    shares: NDArray[np.float32] = powers / powers.sum()
    return shares
