"""From the scheduler's plan to the model's inputs: one flat sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.dispatch import Kernels
from nbengine.scheduler.output import SchedulerOutput
from nbengine.worker.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.worker.input_batch import InputBatch


class StagingBuffer:
    """Memory that numpy fills and the device reads: one array on a CPU, else pinned memory and its copy.

    A copy may still be under way when the next step's is filled: there are two arrays of pinned memory, filled in
    turn. It has ended when the results of its step have been waited for, as they are before the step after next.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._host = torch.zeros(size, dtype=dtype, pin_memory=pinned)
        self._other = torch.zeros(size, dtype=dtype, pin_memory=True) if pinned else self._host
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)

    @property
    def array(self) -> NDArray[Any]:
        """What the next `tensor` hands over."""
        return self._host.numpy()

    def tensor(self, count: int) -> Tensor:
        """The first `count` elements, on the device."""
        if self._device is self._host:
            return self._host[:count]
        filled, self._host, self._other = self._host, self._other, self._host
        return self._device[:count].copy_(filled[:count], non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's inputs: B requests, T tokens. Requests with one token come first, each part in row order.

    Padding, if any, comes last: a token of no request, and an entry of `logits_index` that repeats.
    """

    req_ids: list[str]
    input_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    attention: AttentionMetadata
    sampled: NDArray[np.int64]
    """Which of `req_ids` get a token: those whose last token is in the step, unless they are pooled."""
    sampled_rows: NDArray[np.int64]
    """Their rows in the batch."""
    logits_index: Tensor | None
    """int64, where their last tokens are in the flat sequence; None: everywhere."""
    prompt_embeds: list[tuple[int, Tensor]]
    """Embeddings [tokens, hidden size], on the CPU, that replace those of the tokens from a position on."""


class StepInputBuilder:
    """Builds `StepInputs` from the batch, with numpy operations over all tokens of a step at once.

    Only here rows are read in another order than theirs: attention wants requests with a single token first.

    With `pad_single` no matrix product has a single row. oneDNN computes those of 16-bit types in another order
    of summation than all others, so a request alone would get other logits than the same request in company;
    two rows take the same time as one.
    """

    def __init__(
        self,
        batch: InputBatch,
        kernels: Kernels,
        *,
        max_num_tokens: int,
        block_size: int,
        device: torch.device,
        pad_single: bool = False,
    ) -> None:
        max_num_reqs = len(batch.block_table)
        self._batch = batch
        self._kernels = kernels
        self._block_size = block_size
        self._device = device
        self._min_rows = 2 if pad_single else 1
        self._input_ids = StagingBuffer(max_num_tokens + 1, torch.int64, device)
        self._positions = StagingBuffer(max_num_tokens + 1, torch.int64, device)
        self._logits_index = StagingBuffer(max_num_reqs + 1, torch.int64, device)
        self._range = np.arange(max(max_num_tokens, max_num_reqs) + 1)

    def build(self, plan: SchedulerOutput) -> StepInputs:
        """Lay out a plan of at least one token."""
        batch = self._batch
        total = plan.total_num_scheduled_tokens
        rows, counts, block_table = self._order(plan)
        computed = batch.rows["num_computed_tokens"][rows]
        seq_lens = computed + counts
        if total == len(rows):
            ends = self._range[1 : total + 1]
            token_rows, positions = rows, computed
        else:
            ends = counts.cumsum()
            token_rows = rows.repeat(counts)
            positions = self._range[:total] + (seq_lens - ends).repeat(counts)
        self._input_ids.array[:total] = batch.token_ids[token_rows, positions]
        self._positions.array[:total] = positions
        is_due = seq_lens == batch.rows["num_tokens"][rows]
        if batch.pooling_req_ids:
            is_due &= ~batch.rows["is_pooling"][rows]
        sampled = np.flatnonzero(is_due)
        num_rows = max(total, self._min_rows)
        return StepInputs(
            req_ids=[batch.req_ids[row] for row in rows.tolist()],
            input_ids=self._input_ids.tensor(num_rows),
            positions=self._positions.tensor(num_rows),
            attention=self._attention(counts.astype(np.int32), seq_lens.astype(np.int32), block_table, total),
            sampled=sampled,
            sampled_rows=rows[sampled],
            logits_index=None if len(sampled) == num_rows else self._index(ends[sampled] - 1),
            prompt_embeds=self._prompt_embeds(rows, counts, ends) if batch.prompt_embeds else [],
        )

    def _prompt_embeds(
        self, rows: NDArray[np.int64], counts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> list[tuple[int, Tensor]]:
        batch = self._batch
        found = []
        for req_id, embeds in batch.prompt_embeds.items():
            row = batch.row_of.get(req_id)
            if row is None:
                continue
            start = int(batch.rows["num_computed_tokens"][row])
            if start < len(embeds):
                for index in np.flatnonzero(rows == row).tolist():
                    count = int(counts[index])
                    found.append((int(ends[index]) - count, embeds[start : start + count]))
        return found

    def _attention(
        self,
        counts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_table: NDArray[np.int32],
        total: int,
    ) -> AttentionMetadata:
        if total < self._min_rows:
            # The padding is a request of one token, which reads one token and writes none.
            one = np.ones(1, np.int32)
            counts, seq_lens = np.append(counts, one), np.append(seq_lens, one)
            block_table = block_table.repeat(2, axis=0)
        metadata = build_attention_metadata(
            counts,
            seq_lens,
            block_table,
            block_size=self._block_size,
            kernels=self._kernels,
            device=self._device,
        )
        if total < self._min_rows:
            metadata.slot_mapping[total:] = -1
        return metadata

    def _order(self, plan: SchedulerOutput) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Rows, token counts and KV blocks of the plan's requests, those with one token first."""
        batch = self._batch
        scheduled = plan.num_scheduled_tokens
        num_reqs = len(scheduled)
        if num_reqs == plan.total_num_scheduled_tokens == batch.num_reqs:
            return self._range[:num_reqs], np.ones(num_reqs, np.int64), batch.block_table[:num_reqs]
        rows = np.fromiter(map(batch.row_of.__getitem__, scheduled), np.int64, num_reqs)
        counts = np.fromiter(scheduled.values(), np.int64, num_reqs)
        order = np.lexsort((rows, counts > 1))
        rows = rows[order]
        return rows, counts[order], batch.block_table[rows]

    def _index(self, positions: NDArray[np.int64]) -> Tensor:
        count = len(positions)
        index = self._logits_index
        index.array[:count] = positions
        if 0 < count < self._min_rows:
            index.array[count] = positions[0]
            count += 1
        return index.tensor(count)
