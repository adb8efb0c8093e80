"""Log probabilities of prompt tokens, gathered over the chunks in which a prompt is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.ipc.messages import LogprobsLists
from nbengine.sampling.logprobs import compute_logprobs
from nbengine.sampling.rows import upload
from nbengine.scheduler.output import NewRequestData, SchedulerOutput

_PIECE_BYTES = 32 << 20
"""Logits are computed for so much memory at once, however long the prompts are."""


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


@dataclass(frozen=True, slots=True)
class _Part:
    """Positions of a prompt that a step has computed."""

    gathering: _Gathering
    start: int
    """First position in the prompt."""
    first_row: int
    """Its row among the step's hidden states."""
    length: int


class PromptLogprobs:
    """Keeps what has been found out about the prompts of the requests that want it.

    What was computed before a preemption is not computed again, and what was handed out once is forgotten.
    """

    def __init__(
        self, compute_logits: Callable[[Tensor], Tensor], vocab_size: int, device: torch.device
    ) -> None:
        self._compute_logits = compute_logits
        self._vocab_size = vocab_size
        self._device = device
        self._gatherings: dict[str, _Gathering] = {}

    def update(self, plan: SchedulerOutput) -> None:
        """Begin with the new requests that want it, and forget those that have ended."""
        for new in plan.scheduled_new_reqs:
            self._begin(new)
        if self._gatherings:
            for req_id in plan.finished_req_ids:
                self._gatherings.pop(req_id, None)

    def collect(self, plan: SchedulerOutput, req_ids: Sequence[str], hidden: Tensor) -> list[str]:
        """Take what a step computed.

        Args:
            plan: of the step.
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
                parts.append(_Part(gathering, start, row + start - first, end - start))
            if first + count > len(gathering.targets):
                done.append(req_id)
        if parts:
            self._compute(parts, hidden)
        return done

    def take(self, req_ids: Sequence[str]) -> dict[str, LogprobsLists] | None:
        """Hand out complete prompts; waits for the device."""
        if not req_ids:
            return None
        found = {}
        for req_id in req_ids:
            part = self._gatherings.pop(req_id)
            columns = part.token_ids.tolist(), part.logprobs.tolist(), part.ranks.tolist()
            found[req_id] = LogprobsLists(*columns)
        return found

    def _begin(self, new: NewRequestData) -> None:
        params = new.sampling_params
        if params is None or params.prompt_logprobs is None:
            return
        targets = torch.tensor(new.token_ids[1:], dtype=torch.int64, device=self._device)
        count = min(params.prompt_logprobs, self._vocab_size)
        shape = (len(targets), count + 1)
        self._gatherings[new.req_id] = _Gathering(
            targets=targets,
            count=count,
            token_ids=torch.empty(shape, dtype=torch.int64, device=self._device),
            logprobs=torch.empty(shape, device=self._device),
            ranks=torch.empty_like(targets),
        )

    def _compute(self, parts: Sequence[_Part], hidden: Tensor) -> None:
        rows = upload(_ranges(parts), self._device)
        targets = torch.cat([p.gathering.targets[p.start : p.start + p.length] for p in parts])
        count = max(part.gathering.count for part in parts)
        size = max(1, _PIECE_BYTES // (4 * self._vocab_size))
        pieces = []
        for start in range(0, len(rows), size):
            logits = self._compute_logits(hidden.index_select(0, rows[start : start + size]))
            pieces.append(compute_logprobs(logits, targets[start : start + size], count))
        token_ids = torch.cat([piece.token_ids for piece in pieces])
        logprobs = torch.cat([piece.logprobs for piece in pieces])
        ranks = torch.cat([piece.ranks for piece in pieces])
        end = 0
        for part in parts:
            begin, end = end, end + part.length
            part.gathering.store(part.start, token_ids[begin:end], logprobs[begin:end], ranks[begin:end])


def _ranges(parts: Sequence[_Part]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(part.first_row, part.first_row + part.length) for part in parts])


def _first_positions(plan: SchedulerOutput) -> dict[str, int]:
    cached = plan.scheduled_cached_reqs
    starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    starts.update((new.req_id, new.num_computed_tokens) for new in plan.scheduled_new_reqs)
    return starts
