"""The persistent batch: what the worker knows of every request that holds KV blocks, in struct-of-arrays form.

A step changes only what the scheduler says has changed. Rows are never reordered for a step; whoever needs
another order indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.sampling.metadata import SamplingMetadata
from nbengine.sampling.random_streams import UnseededStreams, seeded_stream, uniforms
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

_ROW = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_prompt_tokens", np.int64),
        ("num_computed_tokens", np.int64),
        ("num_blocks", np.int64),
        ("is_pooling", np.bool_),
        ("stream", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("temperature", np.float32),
    ]
)


_NO_SAMPLING = SamplingParams(temperature=0, seed=0)
"""Stands in a pooling request's row. The seed keeps it from taking a stream that an unseeded request would get."""


@dataclass(frozen=True, slots=True)
class CachedRequestState:
    """A preempted request: everything of its row but the blocks, which it has lost."""

    row: np.void
    token_ids: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _MinTokens:
    """A request that may not end before it has `count` output tokens."""

    count: int
    end_token_ids: tuple[int, ...]


class InputBatch:
    """Requests in rows `0 … num_reqs - 1`; a request that leaves gives its row to the last one.

    Requests without a seed draw from streams that begin at `seed`.
    `token_ids` holds prompt and output tokens, `block_table` the KV blocks of each row; `rows` the rest.
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        *,
        seed: int = 0,
    ) -> None:
        max_blocks = -(-max_model_len // block_size)
        self.block_table = np.zeros((max_num_reqs, max_blocks), np.int32)
        self.token_ids = np.zeros((max_num_reqs, max_model_len), np.int32)
        self.rows = np.zeros(max_num_reqs, _ROW)
        self.req_ids: list[str] = []
        self.row_of: dict[str, int] = {}
        self.version = 0
        """Changes whenever a row changes hands."""
        self._vocab_size = vocab_size
        self._streams = UnseededStreams(seed)
        self._preempted: dict[str, CachedRequestState] = {}
        self._min_tokens: dict[str, _MinTokens] = {}
        self.pooling_req_ids: set[str] = set()
        """Requests that get no token when their prompt is computed."""
        self._bans = _Bans.none()
        self._bans_version = 0

    @property
    def num_reqs(self) -> int:
        """Rows in use."""
        return len(self.req_ids)

    def update(self, plan: SchedulerOutput) -> None:
        """Take over what a plan changes: first the requests that leave, then those that come and go on."""
        for req_id in plan.finished_req_ids:
            self._preempted.pop(req_id, None)
            self._min_tokens.pop(req_id, None)
            self.pooling_req_ids.discard(req_id)
            if req_id in self.row_of:
                self._remove(req_id)
        for req_id in plan.preempted_req_ids:
            self._suspend(req_id)
        for new in plan.scheduled_new_reqs:
            self._add_new(new)
        self._update_cached(plan.scheduled_cached_reqs)

    def append(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """Append one sampled token to each of `rows`."""
        num_tokens = self.rows["num_tokens"]
        self.token_ids[rows, num_tokens[rows]] = token_ids
        num_tokens[rows] += 1

    def sampling_metadata(self, rows: NDArray[np.int64], device: torch.device) -> SamplingMetadata:
        """Sampling parameters of `rows`, in that order."""
        columns = self.rows[rows]
        return SamplingMetadata.build(
            columns["temperature"],
            columns["top_k"],
            columns["top_p"],
            columns["min_p"],
            vocab_size=self._vocab_size,
            device=device,
        )

    def uniforms(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """The random number of each row's next output token, in [0, 1)."""
        return uniforms(self.rows["stream"][rows], self._num_output_tokens(rows))

    def banned_tokens(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Tokens that would end a request too early, as (positions in `rows`, token ids); None: there are none."""
        if not self._min_tokens:
            return None
        if self._bans_version != self.version:
            self._bans = _Bans.of(
                {self.row_of[r]: m for r, m in self._min_tokens.items() if r in self.row_of}
            )
            self._bans_version = self.version
        bans = self._bans
        position = np.full(self.num_reqs, -1)
        position[rows] = np.arange(len(rows))
        positions = position[bans.rows]
        early = (positions >= 0) & (self._num_output_tokens(bans.rows) < bans.min_tokens)
        if not early.any():
            return None
        return positions[early], bans.token_ids[early]

    def _num_output_tokens(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        columns = self.rows
        outputs: NDArray[np.int64] = columns["num_tokens"][rows] - columns["num_prompt_tokens"][rows]
        return outputs

    def _add_new(self, new: NewRequestData) -> None:
        params = new.sampling_params or _NO_SAMPLING
        num_tokens = len(new.token_ids)
        row: np.void = np.zeros(1, _ROW)[0]
        row["num_tokens"] = row["num_prompt_tokens"] = num_tokens
        row["num_computed_tokens"] = new.num_computed_tokens
        row["stream"] = self._streams.take() if params.seed is None else seeded_stream(params.seed)
        row["temperature"] = 0 if params.is_greedy else params.temperature
        row["top_k"], row["top_p"], row["min_p"] = params.top_k, params.top_p, params.min_p
        if new.sampling_params is None:
            row["is_pooling"] = True
            self.pooling_req_ids.add(new.req_id)
        if params.min_tokens:
            self._min_tokens[new.req_id] = _min_tokens(params, self._vocab_size)
        self._add(new.req_id, CachedRequestState(row, np.asarray(new.token_ids, np.int32)))
        self._extend_blocks(self.row_of[new.req_id], new.block_ids)

    def _update_cached(self, cached: CachedRequestData) -> None:
        if not cached.req_ids:
            return
        for req_id in cached.resumed_req_ids:
            self._add(req_id, self._preempted.pop(req_id))
        rows = np.fromiter(map(self.row_of.__getitem__, cached.req_ids), np.int64, len(cached.req_ids))
        self.rows["num_computed_tokens"][rows] = cached.num_computed_tokens
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids:
                self._extend_blocks(row, block_ids)

    def _extend_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        start = self.rows["num_blocks"][row]
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
        self.version += 1

    def _remove(self, req_id: str) -> None:
        row = self.row_of.pop(req_id)
        last_id = self.req_ids.pop()
        last = self.num_reqs
        if row != last:
            moved = self.rows[last]
            self.token_ids[row, : moved["num_tokens"]] = self.token_ids[last, : moved["num_tokens"]]
            self.block_table[row, : moved["num_blocks"]] = self.block_table[last, : moved["num_blocks"]]
            self.rows[row] = moved
            self.req_ids[row] = last_id
            self.row_of[last_id] = row
        self.version += 1


@dataclass(frozen=True, slots=True)
class _Bans:
    """The end tokens of all rows with `min_tokens`, flattened: one entry a (row, end token) pair."""

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    min_tokens: NDArray[np.int64]

    @classmethod
    def none(cls) -> _Bans:
        return cls.of({})

    @classmethod
    def of(cls, limits: dict[int, _MinTokens]) -> _Bans:
        entries = [(row, token, m.count) for row, m in limits.items() for token in m.end_token_ids]
        rows, token_ids, counts = np.array(entries, np.int64).reshape(-1, 3).T
        return cls(rows, token_ids, counts)


def _min_tokens(params: SamplingParams, vocab_size: int) -> _MinTokens:
    end_token_ids = set(params.stop_token_ids)
    if params.eos_token_id is not None:
        end_token_ids.add(params.eos_token_id)
    return _MinTokens(params.min_tokens, tuple(token for token in end_token_ids if 0 <= token < vocab_size))
