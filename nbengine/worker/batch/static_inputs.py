"""The inputs of decode steps on a GPU, at places that stay, so that a recorded step finds those of the next one there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.dispatch import Kernels
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups
from nbengine.scheduler.output import SchedulerOutput
from nbengine.worker.batch.decode_inputs import one_token_each
from nbengine.worker.batch.group_inputs import all_groups
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.staging import StagingBuffer
from nbengine.worker.batch.step_inputs import StepInputs

MOST_ROWS = 256
"""More requests than that keep a GPU busy while the host starts one operation after the other."""
_FEWEST_TOKENS = 512
_ALIGNMENT = 16
"""Elements: kernels are compiled for pointers that are multiples of 16 bytes."""


def padded_rows(count: int) -> int:
    """Return the rows with which a step of `count` requests, at most MOST_ROWS, is computed: one of few numbers, of
    which each has graphs of its own."""
    if count <= 8:
        return 1 << (count - 1).bit_length()
    step = 8 if count <= 64 else 32
    return -(-count // step) * step


def padded_tokens(longest: int, most: int) -> int:
    """Return for how many tokens of context a step is laid out whose longest request has `longest`, of `most` that a
    request can have: one of few numbers."""
    return min(max(_FEWEST_TOKENS, 1 << (longest - 1).bit_length()), most)


def padded_shapes(most_requests: int, most_tokens: int) -> list[tuple[int, int]]:
    """Return the shapes of all steps of up to `most_requests` requests of up to `most_tokens` tokens each."""
    rows = {padded_rows(count) for count in range(1, min(most_requests, MOST_ROWS) + 1)}
    lengths = (min(1 << bit, most_tokens) for bit in range(most_tokens.bit_length() + 1))
    tokens = {padded_tokens(length, most_tokens) for length in lengths}
    return [(row, token) for row in sorted(rows) for token in sorted(tokens)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The parts of the two arrays that belong to steps of one shape: offsets and tensors."""

    rows: int
    columns: int
    """Blocks of each row of a block table."""
    part: int
    """Elements from one part of `longs` to the next: token ids, positions, the slots of each group."""
    tables: list[int]
    """The places in `ints` at which the groups' block tables begin; the lengths of the sequences come before them."""
    num_longs: int
    num_ints: int
    input_ids: Tensor
    positions: Tensor
    attention: list[AttentionMetadata]
    """Those of each group."""
    metadata: AttentionMetadata | StepMetadata
    """The same, as the model takes them."""


class StaticInputs:
    """A builder of `StepInputs` for steps in which each request of the batch computes its last token, laid out for one
    of few shapes: `padded_rows` requests, `padded_tokens` tokens of the longest. Each shape has its tensors, which
    stay where they are; all shapes share their memory.

    Padding comes last. A row of padding reads one token, of block 0, and writes none.
    """

    def __init__(
        self,
        batch: InputBatch,
        kernels: Kernels,
        block_size: int,
        device: torch.device,
        groups: CacheGroups = ONE_GROUP,
    ) -> None:
        """Lay out a batch for a model whose cache groups are all of attention layers."""
        most_rows, max_blocks = batch.block_table.shape
        self._batch = batch
        self._kernels = kernels
        self._block_size = block_size
        self._num_tables = groups.num_tables
        self._most_requests = min(most_rows, MOST_ROWS)
        self._max_blocks = max_blocks
        rows = padded_rows(self._most_requests)
        self._rows = np.arange(rows)
        part = _aligned(rows)
        self._longs = StagingBuffer((2 + self._num_tables) * part, torch.int64, device)
        table = _aligned(rows * max_blocks)
        self._ints = StagingBuffer(part + self._num_tables * table, torch.int32, device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._layouts: dict[tuple[int, int], _Layout] = {}

    def build(self, plan: SchedulerOutput) -> StepInputs | None:
        """Lay out a step; None where it is another kind of step, or one of too many requests."""
        batch, count = self._batch, plan.total_num_scheduled_tokens
        if count > self._most_requests or not one_token_each(batch, plan):
            return None
        computed = batch.rows["num_computed_tokens"][:count]
        seq_lens = computed + 1
        if (seq_lens != batch.rows["num_tokens"][:count]).any():
            return None
        tokens = padded_tokens(int(seq_lens.max()), self._max_blocks * self._block_size)
        key = padded_rows(count), tokens
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._make_layout(*key)
        self._fill(layout, computed, seq_lens)
        return StepInputs(
            req_ids=batch.req_ids.copy(),
            input_ids=layout.input_ids,
            positions=layout.positions,
            attention=layout.metadata,
            sampled=self._rows[:count],
            sampled_rows=self._rows[:count],
            logits_index=None,
            prompt_embeds=[],
        )

    def _fill(self, layout: _Layout, computed: NDArray[np.int64], seq_lens: NDArray[np.int64]) -> None:
        """Write the numbers of a step into the arrays, and copy them to the device."""
        batch, count, part, rows = self._batch, len(computed), layout.part, layout.rows
        own, columns = self._rows[:count], computed // self._block_size
        longs, ints = self._longs.array, self._ints.array
        longs[:count] = batch.token_ids[own, computed]
        longs[part : part + count] = computed
        longs[count:rows] = longs[part + count : part + rows] = 0
        ints[:count] = seq_lens
        ints[count:rows] = 1
        for group, begin in enumerate(layout.tables):
            table = batch.block_tables[group]
            slots = longs[(2 + group) * part :][:rows]
            slots[:count] = table[own, columns]
            slots[:count] *= self._block_size
            slots[:count] += computed % self._block_size
            slots[count:] = -1
            places = ints[begin : begin + rows * layout.columns].reshape(rows, layout.columns)
            places[:count] = table[:count, : layout.columns]
            places[count:] = 0
        for attention in layout.attention:
            attention.plan = None
        self._longs.tensor(layout.num_longs)
        self._ints.tensor(layout.num_ints)

    def _make_layout(self, rows: int, tokens: int) -> _Layout:
        part, columns = _aligned(rows), -(-tokens // self._block_size)
        tables = [part + group * _aligned(rows * columns) for group in range(self._num_tables)]
        longs, ints = self._longs.device_array, self._ints.device_array
        attention = [
            AttentionMetadata(
                query_start_loc=self._starts[: rows + 1],
                seq_lens=ints[:rows],
                block_table=ints[begin : begin + rows * columns].view(rows, columns),
                slot_mapping=longs[(2 + group) * part :][:rows],
                num_reqs=rows,
                num_tokens=rows,
                max_query_len=1,
                max_seq_len=tokens,
                num_decodes=rows,
                kernels=self._kernels,
            )
            for group, begin in enumerate(tables)
        ]
        return _Layout(
            rows=rows,
            columns=columns,
            part=part,
            tables=tables,
            num_longs=(2 + self._num_tables) * part,
            num_ints=tables[-1] + rows * columns,
            input_ids=longs[:rows],
            positions=longs[part : part + rows],
            attention=attention,
            metadata=attention[0] if len(attention) == 1 else all_groups(attention, None),
        )


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
