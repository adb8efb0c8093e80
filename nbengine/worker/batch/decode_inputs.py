"""The inputs of steps in which every request of the batch computes its last token and gets the next one, for each cache
group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.dispatch import Kernels, RecurrentKernels
from nbengine.kernels.recurrent_metadata import RecurrentMetadata
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kv_cache.specs import ONE_GROUP, CacheGroups
from nbengine.scheduler.output import SchedulerOutput
from nbengine.worker.batch.group_inputs import all_groups
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.step_inputs import StepInputs


@dataclass(frozen=True, slots=True)
class _Views:
    """The parts of the arrays that belong to the first rows of a batch, as arrays and as tensors."""

    rows: NDArray[np.int64]
    computed: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    """[groups, rows]"""
    seq_lens: NDArray[np.int32]
    input_ids: Tensor
    position_ids: Tensor
    attention: list[AttentionMetadata]
    """Those of the groups of attention layers."""
    states: NDArray[np.int32]
    state_slots: NDArray[np.int64]
    recurrent: RecurrentMetadata | None
    metadata: AttentionMetadata | StepMetadata
    """The inputs that the model takes, all of these."""


def one_token_each(batch: InputBatch, plan: SchedulerOutput) -> bool:
    """Return whether every request of the batch computes one token that is given as a token, finds its state in its own
    slot and leaves it there. Whether that token is its last one remains to be seen."""
    count = plan.total_num_scheduled_tokens
    if not count == batch.num_reqs == len(plan.num_scheduled_tokens):
        return False
    return not (batch.pooling_req_ids or batch.prompt_embeds or plan.state_slots or plan.checkpoints)


class DecodeInputs:
    """A builder of `StepInputs` for the steps that there are most of, on the CPU.

    Everything lies in arrays that stay where they are and are overwritten by the next step: a step writes only
    the numbers that it does not have in common with the one before. `StepInputBuilder.build` would make the same
    inputs, in five times the time.
    """

    def __init__(
        self,
        batch: InputBatch,
        kernels: Kernels,
        block_size: int,
        *,
        pad_single: bool = False,
        groups: CacheGroups = ONE_GROUP,
        num_slots: int = 0,
        recurrent_kernels: RecurrentKernels | None = None,
    ) -> None:
        """Keep what is laid out, as in `StepInputBuilder`, to which a single request is left with `pad_single`."""
        self._batch = batch
        self._kernels = kernels
        self._num_tables = groups.num_tables
        self._num_slots = num_slots
        self._recurrent_kernels = recurrent_kernels
        self._fewest = 2 if pad_single else 1
        self._shift, self._mask = block_size.bit_length() - 1, block_size - 1
        most = len(batch.block_table)
        self._rows = np.arange(most)
        self._ids, self._positions = torch.zeros(2, most, dtype=torch.int64)
        self._slots = torch.zeros(self._num_tables, most, dtype=torch.int64)
        self._states = torch.zeros(most, dtype=torch.int32)
        self._no_checkpoints = torch.zeros(most + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(most, dtype=torch.int32)
        self._starts = torch.arange(most + 1, dtype=torch.int32)
        self._block_tables = torch.from_numpy(batch.block_tables)
        self._views: dict[int, _Views] = {}

    def build(self, plan: SchedulerOutput) -> StepInputs | None:
        """Lay out a step; None where it is another kind of step."""
        batch, count = self._batch, plan.total_num_scheduled_tokens
        if count < self._fewest or not one_token_each(batch, plan):
            return None
        views = self._views.get(count)
        if views is None:
            views = self._views[count] = self._make_views(count)
        rows, computed, seq_lens, slots = views.rows, views.computed, views.seq_lens, views.slots
        np.add(computed, 1, out=seq_lens, casting="unsafe")
        if (seq_lens != views.num_tokens).any():
            return None
        views.positions[:] = computed
        views.ids[:] = batch.token_ids[rows, computed]
        # Steps that follow at once have longer requests.
        columns, longest = computed >> self._shift, int(seq_lens.max()) + plan.num_steps - 1
        for table, own, attention in zip(batch.block_tables, slots, views.attention, strict=False):
            own[:] = table[rows, columns]
            attention.max_seq_len, attention.plan = longest, None
        slots <<= self._shift
        slots += computed & self._mask
        if views.recurrent is not None:
            views.states[:] = views.state_slots
            views.recurrent.plan = None
        return StepInputs(
            req_ids=batch.req_ids.copy(),
            input_ids=views.input_ids,
            positions=views.position_ids,
            attention=views.metadata,
            sampled=rows,
            sampled_rows=rows,
            logits_index=None,
            prompt_embeds=[],
        )

    def _make_views(self, count: int) -> _Views:
        batch = self._batch
        ids, positions, seq_lens = (part[:count] for part in (self._ids, self._positions, self._seq_lens))
        slots, states = self._slots[:, :count], self._states[:count]
        attention = [
            AttentionMetadata(
                query_start_loc=self._starts[: count + 1],
                seq_lens=seq_lens,
                block_table=self._block_tables[group, :count],
                slot_mapping=slots[group],
                num_reqs=count,
                num_tokens=count,
                max_query_len=1,
                max_seq_len=0,
                num_decodes=count,
                kernels=self._kernels,
            )
            for group in range(self._num_tables)
        ]
        recurrent = self._recurrent(states)
        is_single = recurrent is None and len(attention) == 1
        return _Views(
            rows=self._rows[:count],
            computed=batch.rows["num_computed_tokens"][:count],
            num_tokens=batch.rows["num_tokens"][:count],
            ids=ids.numpy(),
            positions=positions.numpy(),
            slots=slots.numpy(),
            seq_lens=seq_lens.numpy(),
            input_ids=ids,
            position_ids=positions,
            attention=attention,
            states=states.numpy(),
            state_slots=batch.rows["state_slot"][:count],
            recurrent=recurrent,
            metadata=attention[0] if is_single else all_groups(attention, recurrent),
        )

    def _recurrent(self, states: Tensor) -> RecurrentMetadata | None:
        """Return the metadata of requests that find their states in `states`, and leave them there."""
        if self._recurrent_kernels is None:
            return None
        count, none = len(states), self._no_checkpoints[:0]
        return RecurrentMetadata(
            query_start_loc=self._starts[: count + 1],
            slots=states,
            sources=states,
            checkpoint_start_loc=self._no_checkpoints[: count + 1],
            checkpoint_requests=none,
            checkpoint_ends=none,
            checkpoint_slots=none,
            num_reqs=count,
            num_tokens=count,
            max_query_len=1,
            num_decodes=count,
            num_slots=self._num_slots,
            kernels=self._recurrent_kernels,
        )
