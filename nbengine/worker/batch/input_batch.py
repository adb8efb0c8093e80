"""The persistent batch: what the worker knows of every request that holds KV blocks, in struct-of-arrays
form.

A step changes only what the scheduler says has changed. Rows are never reordered for a step; code that needs
another order indexes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.sampling.logits_processor import LogitsProcessor
from nbengine.sampling.random_streams import UnseededStreams, seeded_stream
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.sampling_batch import RowTokens, SamplingBatch

_CPU = torch.device("cpu")

_ROW = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_prompt_tokens", np.int64),
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        ("state_slot", np.int64),
        ("is_pooling", np.bool_),
    ],
    align=True,
)


_NO_SAMPLING = SamplingParams(temperature=0, seed=0)
"""The parameters in the row of a request that is not sampled here. The seed keeps it from taking a stream
that an unseeded request would get."""


@dataclass(frozen=True, slots=True)
class CachedRequestState:
    """A preempted request: everything of its row but the blocks and the slot, which it has lost."""

    row: np.void
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Sampled:
    """The sampling parameters of a request and its stream, for as long as the request lives."""

    params: SamplingParams
    stream: int
    prompt_is_known: bool


class InputBatch:
    """Requests in rows `0 … num_reqs - 1`; a request that leaves gives its row to the last one.

    Requests without a seed draw from streams that begin at `seed`. `token_ids` holds prompt and output
    tokens, `block_tables` the KV blocks of each row, for each cache group that has blocks, `sampling` the sampling
    parameters of each row, `rows` the rest.

    A batch that is not `sampled` here but on another pipeline stage takes the sampled tokens from the plans.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        device: torch.device = _CPU,
        processors: Sequence[LogitsProcessor] = (),
        seed: int = 0,
        sampled: bool = True,
        allocations: Allocations | None = None,
        num_tables: int = 1,
        spreads: Sequence[int] = (),
    ) -> None:
        """Make room for `max_num_reqs` requests of `max_model_len` tokens, with `num_tables` block tables each; see
        `CacheRows` for `spreads`."""
        self._allocations = allocations or Allocations()
        max_blocks = -(-max_model_len // block_size)
        self.block_tables = np.zeros((max(num_tables, 1), max_num_reqs, max_blocks), np.int32)
        """[groups, rows, blocks]; what a window has passed stays, and must not be read."""
        self.block_table = self.block_tables[0]
        """The block tables of the first group."""
        self._num_tables = num_tables
        self._spreads = np.asarray([spreads or (1,) * num_tables], np.int32)
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.rows = np.zeros(max_num_reqs, _ROW)
        self._num_tokens, self._num_computed = self.rows["num_tokens"], self.rows["num_computed_tokens"]
        self.req_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        tokens = RowTokens(self.token_ids, self.rows["num_tokens"], self.rows["num_prompt_tokens"])
        self.sampling = SamplingBatch(tokens, vocab_size, device, processors, self._allocations)
        self._is_sampled = sampled
        self._streams = UnseededStreams(seed)
        self._preempted: dict[str, CachedRequestState] = {}
        self._sampled: dict[str, _Sampled] = {}
        self.pooling_req_ids: set[str] = set()
        """The requests that get no token when their prompt is computed."""
        self.prompt_embeds: dict[str, Tensor] = {}
        """Prompts given as embeddings, [prompt tokens, hidden size] on the CPU, until their request has
        ended: a request that was preempted computes its prompt again."""

    @property
    def num_reqs(self) -> int:
        """Count the rows in use."""
        return len(self.req_ids)

    def update(self, plan: SchedulerOutput) -> None:
        """Take over what a plan changes: first the requests that leave, then those that come and go on."""
        # They are sorted because all ranks must have the same rows, and the order of a set differs between
        # processes.
        for req_id in sorted(plan.finished_req_ids):
            self._preempted.pop(req_id, None)
            self._sampled.pop(req_id, None)
            self.pooling_req_ids.discard(req_id)
            self.prompt_embeds.pop(req_id, None)
            if req_id in self.row_of:
                self._remove(req_id)
        for req_id in sorted(plan.preempted_req_ids):
            self._suspend(req_id)
        for new in plan.scheduled_new_reqs:
            self._add_new(new)
        self._update_cached(plan.scheduled_cached_reqs)
        for req_id, (slot, _) in plan.state_slots.items():
            self.rows["state_slot"][self.row_of[req_id]] = slot

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append one sampled token to each of `rows`."""
        self.token_ids[rows, self.append_unknown(rows)] = token_ids
        self.sampling.append(rows, token_ids)

    def append_steps(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append the tokens of several steps, [steps, rows], to rows that `SamplingBatch.is_plain` is true of."""
        starts, count = self._num_tokens[rows], len(token_ids)
        for step, tokens in enumerate(token_ids):
            self.token_ids[rows, starts + step] = tokens
        self._num_tokens[rows] = starts + count

    def append_on_device(self, token_ids: Tensor) -> None:
        """Let whatever follows sampled tokens on the device take them in; called before `append` or
        `append_unknown`."""
        if lost := self.sampling.append_on_device(token_ids):
            self._allocations.starve(self.req_ids[row] for row in lost)

    def append_unknown(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Count one sampled token in each of `rows`, and return their positions, for `fill_in`."""
        positions: NDArray[np.int64] = self._num_tokens[rows]
        self._num_tokens[rows] = positions + 1
        return positions

    def fill_in(
        self, rows: NDArray[np.int64], positions: NDArray[np.int64], token_ids: NDArray[np.int64]
    ) -> None:
        """Write tokens that have been counted, now that they are known."""
        self.token_ids[rows, positions] = token_ids
        self.sampling.append(rows, token_ids)

    def _add_new(self, new: NewRequestData) -> None:
        params = (self._is_sampled and new.sampling_params) or _NO_SAMPLING
        num_tokens = len(new.token_ids)
        row: np.void = np.zeros(1, _ROW)[0]
        row["num_tokens"] = row["num_prompt_tokens"] = num_tokens
        row["num_computed_tokens"] = new.num_computed_tokens
        if new.sampling_params is None:
            row["is_pooling"] = True
            self.pooling_req_ids.add(new.req_id)
        if new.prompt_embeds is not None:
            self.prompt_embeds[new.req_id] = new.prompt_embeds
        stream = self._streams.take() if params.seed is None else seeded_stream(params.seed)
        self._sampled[new.req_id] = _Sampled(params, stream, new.prompt_embeds is None)
        self._add(new.req_id, CachedRequestState(row, np.asarray(new.token_ids, np.int32)))
        self._extend_blocks(self.row_of[new.req_id], new.block_ids)

    def _update_cached(self, cached: CachedRequestData) -> None:
        if not cached.req_ids:
            return
        for req_id in sorted(cached.resumed_req_ids):
            self._add(req_id, self._preempted.pop(req_id))
        if cached.new_token_ids and not self._is_sampled:
            self._extend_tokens(cached.new_token_ids)
        row_of = self.row_of
        # Most steps are of all requests, in the order of their rows.
        rows: slice | NDArray[np.int64] = slice(len(cached.req_ids))
        if cached.req_ids != self.req_ids:
            rows = np.fromiter(map(row_of.__getitem__, cached.req_ids), np.int64, len(cached.req_ids))
        self._num_computed[rows] = cached.num_computed_tokens
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self._extend_blocks(row_of[req_id], block_ids)

    def _extend_tokens(self, new_token_ids: Mapping[str, Sequence[int]]) -> None:
        rows = np.fromiter(map(self.row_of.__getitem__, new_token_ids), np.int64, len(new_token_ids))
        counts = np.fromiter(map(len, new_token_ids.values()), np.int64, len(rows))
        starts = self.rows["num_tokens"][rows]
        self.rows["num_tokens"][rows] = starts + counts
        # The i-th of all tokens is the (i - first)-th of its row.
        firsts = counts.cumsum() - counts
        positions = np.arange(counts.sum()) + (starts - firsts).repeat(counts)
        self.token_ids[rows.repeat(counts), positions] = list(chain.from_iterable(new_token_ids.values()))

    def _extend_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        start = self.rows["num_blocks"][row]
        if self._num_tables > 1:
            # They lie column by column: see `CacheGroups`.
            columns = np.asarray(block_ids, np.int32).reshape(-1, self._num_tables)
            end = start + len(columns)
            self.block_tables[:, row, start:end] = (columns * self._spreads).T
        else:
            end = start + len(block_ids)
            self.block_table[row, start:end] = block_ids
        self.rows["num_blocks"][row] = end

    def _suspend(self, req_id: str) -> None:
        row = self.row_of[req_id]
        saved = self.rows[row].copy()
        saved["num_blocks"] = 0
        self._preempted[req_id] = CachedRequestState(saved, self.token_ids[row, : saved["num_tokens"]].copy())
        self._remove(req_id)

    def _add(self, req_id: str, state: CachedRequestState) -> None:
        row = self.num_reqs
        self.rows[row] = state.row
        self.token_ids[row, : len(state.token_ids)] = state.token_ids
        self.row_of[req_id] = row
        self.req_ids.append(req_id)
        sampled = self._sampled[req_id]
        if not self.sampling.add(
            row, sampled.params, sampled.stream, prompt_is_known=sampled.prompt_is_known
        ):
            self._allocations.starve([req_id])

    def _remove(self, req_id: str) -> None:
        row = self.row_of.pop(req_id)
        last_id = self.req_ids.pop()
        last = self.num_reqs
        if row != last:
            moved = self.rows[last]
            self.token_ids[row, : moved["num_tokens"]] = self.token_ids[last, : moved["num_tokens"]]
            num_blocks = moved["num_blocks"]
            self.block_tables[:, row, :num_blocks] = self.block_tables[:, last, :num_blocks]
            self.rows[row] = moved
            self.req_ids[row] = last_id
            self.row_of[last_id] = row
        self.sampling.remove(row, last)
