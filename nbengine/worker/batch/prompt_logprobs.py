"""Log probabilities of prompt tokens, gathered over the chunks in which a prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.ipc.messages import LogprobsLists
from nbengine.kernels.transfer import upload
from nbengine.sampling.logprobs import LogprobsTensors, compute_logprobs
from nbengine.sampling_params import MAX_LOGPROBS
from nbengine.scheduler.output import Fault, ModelRunnerOutput, NewRequestData, SchedulerOutput
from nbengine.worker.batch.allocation import Allocations

PIECE_BYTES = 32 << 20
"""Logits are computed within this much memory at once, however long the prompts are."""


@dataclass(slots=True)
class _Gathering:
    """A prompt of P tokens, of which the first `num_done` positions have been dealt with.

    Position p says how likely the token at p + 1 was; the last position says nothing about the prompt.
    """

    targets: Tensor
    """int64 [P - 1]"""
    count: int
    token_ids: Tensor
    """int64 [P - 1, count + 1]"""
    logprobs: Tensor
    """float32 [P - 1, count + 1]"""
    ranks: Tensor
    """int64 [P - 1]"""
    num_done: int = 0

    def store(self, start: int, token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
        end = start + len(ranks)
        self.token_ids[start:end] = token_ids[:, : self.count + 1]
        self.logprobs[start:end] = logprobs[:, : self.count + 1]
        self.ranks[start:end] = ranks
        self.num_done = end

    def to_lists(self) -> LogprobsLists | None:
        """Return all of them on the host, None if there is NaN among them."""
        logprobs = self.logprobs.cpu()
        if logprobs.isnan().any():
            return None
        return LogprobsLists(self.token_ids.tolist(), logprobs.tolist(), self.ranks.tolist())


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of positions of a prompt that a step has computed."""

    req_id: str
    gathering: _Gathering
    start: int
    """The first position in the prompt."""
    first_row: int
    """The row of that position among the step's hidden states."""
    length: int


_Computed = tuple[Sequence[_Part], LogprobsTensors]
"""Parts, and what was found for their positions, one part's after the other's."""


class PromptLogprobs:
    """The log probabilities found so far of the prompts of the requests that want them.

    What was computed before a preemption is not computed again, and what was handed out once is forgotten.
    """

    def __init__(
        self,
        compute_logits: Callable[[Tensor], Tensor],
        vocab_size: int,
        device: torch.device,
        allocations: Allocations | None = None,
    ) -> None:
        self._allocations = allocations or Allocations()
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._device = device
        self._gatherings: dict[str, _Gathering] = {}

    def update(self, plan: SchedulerOutput) -> None:
        """Forget the requests that have ended, then begin with the new ones that want log probabilities: one may have
        the id of another that has ended."""
        if self._gatherings:
            for req_id in plan.finished_req_ids:
                self._gatherings.pop(req_id, None)
        for new in plan.scheduled_new_reqs:
            params = new.sampling_params
            if params is not None and params.prompt_logprobs is not None:
                with self._allocations.attempt() as attempt:
                    self._begin(new, params.prompt_logprobs)
                if attempt.failed:
                    self._gatherings.pop(new.req_id, None)
                    self._allocations.starve([new.req_id])

    def collect(self, plan: SchedulerOutput, req_ids: Sequence[str], hidden: Tensor) -> list[str]:
        """Take in what a step computed.

        Args:
            plan: the plan of the step.
            req_ids: the step's requests in the order of their tokens.
            hidden: [tokens of the step, hidden size]; rows past them do not count.

        Returns:
            The requests whose prompt is complete now.
        """
        if not self._gatherings:
            return []
        starts = _first_positions(plan)
        counts = np.fromiter(map(plan.num_scheduled_tokens.__getitem__, req_ids), np.int64, len(req_ids))
        rows = np.cumsum(counts) - counts
        parts, done = [], []
        for req_id, row, count in zip(req_ids, rows.tolist(), counts.tolist(), strict=True):
            gathering = self._gatherings.get(req_id)
            if gathering is None:
                continue
            first = starts[req_id]
            start = max(first, gathering.num_done)
            end = min(first + count, len(gathering.targets))
            if start < end:
                parts.append(_Part(req_id, gathering, start, row + start - first, end - start))
            if first + count > len(gathering.targets):
                done.append(req_id)
        if parts:
            for part in self._allocations.each(partial(self._compute, hidden), parts, _store):
                self._starve(part.req_id)
        return [req_id for req_id in done if req_id in self._gatherings]

    def rehearse(self, hidden: Tensor) -> None:
        """Do the most that a step can do, for its use of memory: every token wants the most log
        probabilities."""
        count = min(MAX_LOGPROBS, self._vocab_size)
        gathering = self._new_gathering([0] * len(hidden), count)
        _store(self._compute(hidden, [_Part("", gathering, 0, 0, len(hidden))]))

    def take(self, req_ids: Sequence[str], output: ModelRunnerOutput) -> None:
        """Write complete prompts into a step's output, or that one has NaN; wait for the device."""
        if not req_ids:
            return
        output.prompt_logprobs = found = {}
        for req_id in req_ids:
            part = self._gatherings.pop(req_id)
            with self._allocations.attempt() as attempt:
                lists = part.to_lists()
            if attempt.failed:
                self._allocations.starve([req_id])
            elif lists is None:
                output.faults = {**(output.faults or {}), req_id: Fault.NOT_FINITE}
            else:
                found[req_id] = lists

    def _starve(self, req_id: str) -> None:
        del self._gatherings[req_id]
        self._allocations.starve([req_id])

    def _begin(self, new: NewRequestData, num_top: int) -> None:
        self._gatherings[new.req_id] = self._new_gathering(new.token_ids[1:], min(num_top, self._vocab_size))

    def _new_gathering(self, token_ids: Sequence[int], count: int) -> _Gathering:
        targets = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        shape = (len(targets), count + 1)
        return _Gathering(
            targets=targets,
            count=count,
            token_ids=torch.empty(shape, dtype=torch.int64, device=self._device),
            logprobs=torch.empty(shape, dtype=torch.float32, device=self._device),
            ranks=torch.empty_like(targets),
        )

    def _compute(self, hidden: Tensor, parts: Sequence[_Part]) -> _Computed:
        """Compute the log probabilities of parts of prompts; this changes nothing."""
        rows = upload(_ranges(parts), self._device)
        targets = torch.cat([p.gathering.targets[p.start : p.start + p.length] for p in parts])
        count = max(part.gathering.count for part in parts)
        size = max(1, PIECE_BYTES // (4 * self._vocab_size))
        pieces = []
        for start in range(0, len(rows), size):
            logits = self._compute_logits(hidden.index_select(0, rows[start : start + size]))
            pieces.append(compute_logprobs(logits, targets[start : start + size], count))
        token_ids = torch.cat([piece.token_ids for piece in pieces])
        logprobs = torch.cat([piece.logprobs for piece in pieces])
        ranks = torch.cat([piece.ranks for piece in pieces])
        return parts, LogprobsTensors(token_ids, logprobs, ranks)


def _store(computed: _Computed) -> None:
    parts, found = computed
    end = 0
    for part in parts:
        begin, end = end, end + part.length
        part.gathering.store(
            part.start, found.token_ids[begin:end], found.logprobs[begin:end], found.ranks[begin:end]
        )


def _ranges(parts: Sequence[_Part]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(part.first_row, part.first_row + part.length) for part in parts])


def _first_positions(plan: SchedulerOutput) -> dict[str, int]:
    cached = plan.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
    return starts
