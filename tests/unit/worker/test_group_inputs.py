"""The inputs of steps for models with several cache groups, against what a slow worker knows from the same plans."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.recurrent_metadata import RecurrentMetadata
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.kernels.torch.backend import TorchKernels
from nbengine.kernels.torch.recurrent import TorchRecurrent
from nbengine.kv_cache.specs import make_groups
from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from nbengine.worker.batch.decode_inputs import DecodeInputs
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.step_inputs import StepInputBuilder, StepInputs
from tests.support.thorough import amount
from tests.unit.scheduler.fake_grammar import VOCAB_SIZE
from tests.unit.scheduler.layered_model import first_visible
from tests.unit.scheduler.mixtures import MIXTURES, with_rules
from tests.unit.scheduler.paged_model import FakeWorker, Row
from tests.unit.scheduler.reference import Limits, ReferenceScheduler
from tests.unit.scheduler.simulation import Simulation
from tests.unit.scheduler.test_histories import _random_event

CPU = torch.device("cpu")


class CheckedWorker(FakeWorker):
    """A slow worker beside the product's batch, whose inputs it compares with its own rows."""

    def __init__(self, limits: Limits, *, pads: bool) -> None:
        super().__init__(limits.num_blocks, limits.block_size, None, limits.rules, limits.num_state_slots)
        self.groups = make_groups(limits.rules)
        self.pads = pads
        self.batch = InputBatch(
            limits.max_num_seqs,
            limits.max_model_len + limits.block_size,
            limits.block_size,
            VOCAB_SIZE,
            num_tables=self.groups.num_tables,
        )
        self.num_slots = limits.num_state_slots + pads
        self.builder = StepInputBuilder(
            self.batch,
            TorchKernels(),
            max_num_tokens=limits.budget,
            block_size=limits.block_size,
            device=CPU,
            pad_single=pads,
            groups=self.groups,
            num_slots=self.num_slots,
            recurrent_kernels=TorchRecurrent(),
        )
        self.decodes = DecodeInputs(
            self.batch,
            TorchKernels(),
            limits.block_size,
            pad_single=pads,
            groups=self.groups,
            num_slots=self.num_slots,
            recurrent_kernels=TorchRecurrent() if limits.num_state_slots else None,
        )
        self.num_given_back = self.num_decodes = 0

    def execute(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        self.batch.update(plan)
        self.inputs = None
        if plan.num_scheduled_tokens:
            self.inputs = self.decodes.build(plan)
            self.num_decodes += self.inputs is not None
            self.inputs = self.inputs or self.builder.build(plan)
        output = super().execute(plan, grammar_output)
        for req_id, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            if tokens:
                row = np.array([self.batch.row_of[req_id]])
                self.batch.append(row, np.array(tokens))
        return output

    def _check_writes(self, rows: list[Row]) -> None:
        super()._check_writes(rows)
        if self.inputs is not None:
            self._compare(self.inputs, {row.req_id: row for row in rows})

    def _compare(self, inputs: StepInputs, rows: dict[str, Row]) -> None:
        assert sorted(inputs.req_ids) == sorted(rows)
        ordered = [rows[req_id] for req_id in inputs.req_ids]
        tokens = [token for row in ordered for token in row.tokens]
        is_padded = self.pads and len(tokens) == 1
        assert inputs.input_ids.tolist()[: len(tokens)] == tokens
        assert len(inputs.input_ids) == len(tokens) + is_padded
        metadata = inputs.attention
        groups = metadata.groups if isinstance(metadata, StepMetadata) else (metadata,)
        assert len(groups) == self.groups.num_groups
        for number, group in enumerate(groups[: self.groups.num_tables]):
            self._compare_attention(group, number, ordered, is_padded=is_padded)
        if self.has_states:
            self._compare_states(groups[-1], ordered, is_padded=is_padded)

    def _compare_attention(
        self, group: AttentionMetadata, number: int, rows: list[Row], *, is_padded: bool
    ) -> None:
        slots = [
            self.memory.slot(row.table, number, position)
            for row in rows
            for position in range(row.start, row.end)
        ]
        assert group.slot_mapping.tolist() == slots + [-1] * is_padded
        assert group.seq_lens.tolist() == [row.end for row in rows] + [1] * is_padded
        rule = self.memory.rules[number]
        for row, table in zip(rows, group.block_table.tolist(), strict=False):
            first = first_visible(rule, row.start)
            self.num_given_back += first // self.block_size
            for position in range(first, row.end):
                block_id, offset = table[position // self.block_size], position % self.block_size
                assert block_id * self.block_size + offset == self.memory.slot(row.table, number, position)
        if is_padded:
            assert group.block_table[-1, 0] >= 0

    def _compare_states(self, states: RecurrentMetadata, rows: list[Row], *, is_padded: bool) -> None:
        pad = [self.num_slots - 1] * is_padded
        assert states.num_slots == self.num_slots
        assert states.query_start_loc.diff().tolist() == [len(row.tokens) for row in rows] + [1] * is_padded
        assert states.slots.tolist() == [row.state_slot for row in rows] + pad
        assert states.sources.tolist() == [row.source for row in rows] + [-1] * is_padded
        made = zip(states.checkpoint_requests, states.checkpoint_ends, states.checkpoint_slots, strict=True)
        assert [tuple(map(int, each)) for each in made] == [
            (index, place - row.start, slot)
            for index, row in enumerate(rows)
            for place, slot in row.checkpoints
        ]
        arrays = (states.slots, states.sources, states.checkpoint_requests, states.checkpoint_slots)
        assert all(array.dtype == torch.int32 for array in arrays)


@pytest.mark.parametrize("mixture", [*MIXTURES])
@pytest.mark.parametrize("pads", [False, True])
def test_every_group_is_given_the_blocks_and_slots_of_the_plans(mixture: str, pads: bool) -> None:
    rng = random.Random(f"{mixture} {pads}")
    limits = Limits(2, 1, 56, 5, rng.choice([3, 11]), depth=2, ahead=True)
    limits = with_rules(limits, MIXTURES[mixture], 8, 2, 4)
    needed = ReferenceScheduler(limits).most_blocks(56)
    limits = replace(limits, num_blocks=needed + 6 if needed else 0)
    sim = Simulation(limits)
    sim.worker = worker = CheckedWorker(limits, pads=pads)
    for number in range(amount(130, thorough=2000)):
        _random_event(sim, rng, number)
    sim.finish_everything()
    assert sim.scheduler.make_stats().prefix_cache_hits > 0
    has_windows = any(rule.kind in ("window", "chunk") for rule in limits.rules)
    assert (worker.num_given_back > 0) == has_windows
    assert worker.num_decodes > 0 or pads
