"""The way from the scheduler's plan to the model's inputs: one flat sequence of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.kernels.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.kernels.dispatch import Kernels, RecurrentKernels
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups
from nbengine.scheduler.output import SchedulerOutput
from nbengine.worker.batch.group_inputs import all_groups, recurrent_inputs, recurrent_metadata, step_metadata
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.staging import StagingBuffer


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step: B requests, T tokens. Requests with one token come first, each part in row order.

    Padding, if any, comes last: a token of no request, and an entry of `logits_index` that repeats.
    """

    req_ids: list[str]
    input_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T]"""
    attention: AttentionMetadata | StepMetadata
    """For a model of one group of attention layers its own metadata, else those of all groups."""
    sampled: NDArray[np.int64]
    """The places in `req_ids` of requests that get a token: their last token is in the step, and they are not
    pooled."""
    sampled_rows: NDArray[np.int64]
    """The rows of these requests in the batch."""
    logits_index: Tensor | None
    """int64, the places of their last tokens in the flat sequence; None: every place."""
    prompt_embeds: list[tuple[int, Tensor]]
    """Embeddings [tokens, hidden size], on the CPU, that replace those of the tokens from a position on."""


class StepInputBuilder:
    """A builder that makes `StepInputs` from the batch, with numpy operations over all tokens of a step at
    once.

    Only here are rows read in another order than theirs: attention wants requests with a single token first.

    With `pad_single` no matrix product has a single row. oneDNN computes those of 16-bit types in another
    order of summation than all others, so a request alone would get other logits than the same request in
    company; two rows take the same time as one. Products of our own need no padding.
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
        groups: CacheGroups = ONE_GROUP,
        num_slots: int = 0,
        recurrent_kernels: RecurrentKernels | None = None,
    ) -> None:
        """Build steps of up to `max_num_tokens` for a model with these cache groups; with recurrent layers, in
        `num_slots` slots, of which padding takes the last."""
        max_num_reqs = len(batch.block_table)
        self._groups = groups
        self._num_slots = num_slots
        self._recurrent_kernels = recurrent_kernels
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
        """Lay out a plan of at least one token.

        Raises:
            NBEngineError: the plan has drafts, which are not computed here.
        """
        if plan.scheduled_spec_decode_tokens:
            # To compute drafts, it would take their ids behind the known tokens of their rows, logits for
            # each of their positions instead of a request's last alone (`sampled`, `logits_index`), a sampler
            # that accepts or rejects them, rows of the batch that grow by several tokens, and something that
            # proposes them.
            names = ", ".join(plan.scheduled_spec_decode_tokens)
            raise NBEngineError(
                f"step {plan.step} has drafts for {names}; the model runner computes no drafts"
            )
        batch = self._batch
        total = plan.total_num_scheduled_tokens
        rows, counts, chosen = self._order(plan)
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
        # A request that ends with drafts would have more than its known tokens, and get none: it is refused
        # above.
        is_due = seq_lens == batch.rows["num_tokens"][rows]
        if batch.pooling_req_ids:
            is_due &= ~batch.rows["is_pooling"][rows]
        sampled = np.flatnonzero(is_due)
        num_rows = max(total, self._min_rows)
        return StepInputs(
            req_ids=[batch.req_ids[row] for row in rows.tolist()],
            input_ids=self._input_ids.tensor(num_rows),
            positions=self._positions.tensor(num_rows),
            attention=self._metadata(plan, rows, counts, seq_lens, chosen),
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

    def _metadata(
        self,
        plan: SchedulerOutput,
        rows: NDArray[np.int64],
        counts: NDArray[np.int64],
        seq_lens: NDArray[np.int64],
        chosen: slice | NDArray[np.int64],
    ) -> AttentionMetadata | StepMetadata:
        groups, tables = self._groups, self._batch.block_tables
        found = self._attention(
            counts.astype(np.int32),
            seq_lens.astype(np.int32),
            [tables[group, chosen] for group in range(groups.num_tables)],
            plan.total_num_scheduled_tokens,
        )
        if groups.recurrent is None or self._recurrent_kernels is None:
            return found[0] if len(found) == 1 else all_groups(found, None)
        padded = plan.total_num_scheduled_tokens < self._min_rows
        states = recurrent_inputs(self._batch, plan, rows, counts, self._num_slots, padded=padded)
        return all_groups(found, recurrent_metadata(states, self._recurrent_kernels, self._device))

    def _attention(
        self,
        counts: NDArray[np.int32],
        seq_lens: NDArray[np.int32],
        block_tables: list[NDArray[np.int32]],
        total: int,
    ) -> list[AttentionMetadata]:
        if not block_tables:
            return []
        if total < self._min_rows:
            # The padding is a request of one token, which reads one token, of block 0, and writes none.
            one = np.ones(1, np.int32)
            counts, seq_lens = np.append(counts, one), np.append(seq_lens, one)
            block_tables = [np.concatenate((table, np.zeros_like(table))) for table in block_tables]
        first = build_attention_metadata(
            counts,
            seq_lens,
            block_tables[0],
            block_size=self._block_size,
            kernels=self._kernels,
            device=self._device,
        )
        found = [first]
        if len(block_tables) > 1:
            found = step_metadata(first, block_tables[1:], counts, seq_lens, self._block_size)
        if total < self._min_rows:
            for metadata in found:
                metadata.slot_mapping[total:] = -1
        return found

    def _order(
        self, plan: SchedulerOutput
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], slice | NDArray[np.int64]]:
        """Return the rows and token counts of the plan's requests, those with one token first, and what chooses the
        rows in an array."""
        batch = self._batch
        scheduled = plan.num_scheduled_tokens
        num_reqs = len(scheduled)
        if num_reqs == plan.total_num_scheduled_tokens == batch.num_reqs:
            return self._range[:num_reqs], np.ones(num_reqs, np.int64), slice(num_reqs)
        rows = np.fromiter(map(batch.row_of.__getitem__, scheduled), np.int64, num_reqs)
        counts = np.fromiter(scheduled.values(), np.int64, num_reqs)
        order = np.lexsort((rows, counts > 1))
        rows = rows[order]
        return rows, counts[order], rows

    def _index(self, positions: NDArray[np.int64]) -> Tensor:
        count = len(positions)
        index = self._logits_index
        index.array[:count] = positions
        if 0 < count < self._min_rows:
            index.array[count] = positions[0]
            count += 1
        return index.tensor(count)
