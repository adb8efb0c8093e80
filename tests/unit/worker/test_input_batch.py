"""The persistent batch against a plain dictionary, over arbitrary histories; and the inputs made from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import permutations
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.torch.backend import TorchKernels
from nbengine.sampling.random_streams import seeded_stream
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.batch.decode_inputs import DecodeInputs
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.step_inputs import StepInputBuilder
from tests.support.thorough import amount, some

MAX_REQS, MAX_LEN, BLOCK, VOCAB = 5, 40, 4, 100
CPU = torch.device("cpu")


@dataclass
class Expected:
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    block_ids: list[int]
    num_computed: int = 0
    running: bool = True


def plan(**changes: Any) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=changes.get("new", []),
        scheduled_cached_reqs=changes.get("cached", CachedRequestData()),
        num_scheduled_tokens=changes.get("scheduled", {}),
        total_num_scheduled_tokens=sum(changes.get("scheduled", {}).values()),
        finished_req_ids=set(changes.get("finished", ())),
        preempted_req_ids=set(changes.get("preempted", ())),
    )


class Histories(RuleBasedStateMachine):
    """Requests come, advance, lose their blocks, resume and leave; rows always hold what a dictionary holds."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = InputBatch(MAX_REQS, MAX_LEN, BLOCK, VOCAB)
        self.known: dict[str, Expected] = {}
        self.count = 0
        kernels = TorchKernels()
        self.decodes = [DecodeInputs(self.batch, kernels, BLOCK, pad_single=pads) for pads in (False, True)]
        self.builders = [
            StepInputBuilder(
                self.batch, kernels, max_num_tokens=64, block_size=BLOCK, device=CPU, pad_single=pads
            )
            for pads in (False, True)
        ]

    def running(self) -> list[str]:
        return [req_id for req_id, request in self.known.items() if request.running]

    @precondition(lambda self: len(self.running()) < MAX_REQS)
    @rule(
        tokens=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        temperature=st.sampled_from([0.0, 1e-7, 0.5, 2.0]),
        top_k=st.integers(0, 200),
        seed=st.integers(0, 2**63 - 1),
    )
    def add(self, tokens: list[int], temperature: float, top_k: int, seed: int) -> None:
        req_id, self.count = f"r{self.count}", self.count + 1
        params = SamplingParams(temperature=temperature, top_k=top_k, seed=seed)
        blocks = [self.count * 10 + i for i in range(-(-len(tokens) // BLOCK))]
        self.known[req_id] = Expected(list(tokens), len(tokens), params, blocks)
        self.batch.update(plan(new=[NewRequestData(req_id, tokens, params, blocks.copy(), 0)]))

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def advance_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.running()), unique=True, min_size=1))
        chosen = [req_id for req_id in chosen if len(self.known[req_id].token_ids) < MAX_LEN]
        cached = CachedRequestData(req_ids=chosen)
        for req_id in chosen:
            request = self.known[req_id]
            request.num_computed = len(request.token_ids) - 1
            new_block = len(request.block_ids) * BLOCK < len(request.token_ids) + 1
            blocks = [1000 + len(request.token_ids)] if new_block else None
            request.block_ids += blocks or []
            cached.new_block_ids.append(blocks)
            cached.num_computed_tokens.append(request.num_computed)
        self.batch.update(plan(cached=cached))
        rows = np.array([self.batch.row_of[req_id] for req_id in chosen], np.int64)
        tokens = np.array([data.draw(st.integers(0, VOCAB - 1)) for _ in chosen], np.int64)
        self.batch.append(rows, tokens)
        for req_id, token in zip(chosen, tokens.tolist(), strict=True):
            self.known[req_id].token_ids.append(token)

    @precondition(lambda self: self.running())
    @rule(
        is_due=st.lists(st.booleans(), max_size=2),
        pads=st.booleans(),
        some=st.booleans(),
        further=st.integers(0, 3),
    )
    def lay_out_a_step_of_single_tokens(
        self, is_due: list[bool], pads: bool, some: bool, further: int
    ) -> None:
        """Those that are not due have one more token after that of the step; others may follow at once."""
        names = self.running()
        cached = CachedRequestData(req_ids=names)
        due = [True] * len(names)
        for place, (name, wanted) in enumerate(zip(names, is_due + [True] * len(names), strict=False)):
            request = self.known[name]
            due[place] = wanted or len(request.token_ids) == 1
            request.num_computed = len(request.token_ids) - (1 if due[place] else 2)
            cached.num_computed_tokens.append(request.num_computed)
            cached.new_block_ids.append(None)
        self.batch.update(plan(cached=cached))
        scheduled = dict.fromkeys(names[some:] if len(names) > 1 else names, 1)
        step = plan(scheduled=scheduled)
        step.num_steps += further
        found = self.decodes[pads].build(step)
        if len(scheduled) < len(names) or not all(due) or (pads and len(names) == 1):
            assert found is None
            return
        assert found is not None
        expected = self.builders[pads].build(step)
        assert (found.req_ids, found.logits_index, found.prompt_embeds) == (expected.req_ids, None, [])
        assert expected.logits_index is None
        assert np.array_equal(found.sampled, expected.sampled)
        assert np.array_equal(found.sampled_rows, expected.sampled_rows)
        assert torch.equal(found.input_ids, expected.input_ids)
        assert torch.equal(found.positions, expected.positions)
        for field in fields(AttentionMetadata):
            one, other = (getattr(inputs.attention, field.name) for inputs in (found, expected))
            if field.name == "max_seq_len":
                # There must be room for the last of the steps.
                other += further
            if isinstance(other, torch.Tensor):
                assert one.dtype is other.dtype
                assert torch.equal(one, other)
            else:
                assert one == other

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def preempt_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.running()), unique=True, min_size=1))
        for req_id in chosen:
            self.known[req_id].running = False
            self.known[req_id].block_ids = []
        self.batch.update(plan(preempted=chosen))

    @precondition(lambda self: len(self.running()) < min(MAX_REQS, len(self.known)))
    @rule(data=st.data())
    def resume_one(self, data: st.DataObject) -> None:
        waiting = [req_id for req_id, request in self.known.items() if not request.running]
        req_id = data.draw(st.sampled_from(waiting))
        request = self.known[req_id]
        request.running = True
        request.num_computed = data.draw(st.integers(0, len(request.token_ids) - 1))
        request.block_ids = [2000 + i for i in range(-(-len(request.token_ids) // BLOCK))]
        cached = CachedRequestData([req_id], {req_id}, [request.block_ids.copy()], [request.num_computed])
        self.batch.update(plan(cached=cached))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def finish_some(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.known)), unique=True, min_size=1))
        for req_id in chosen:
            del self.known[req_id]
        self.batch.update(plan(finished=[*chosen, "never seen"]))

    @invariant()
    def rows_hold_what_the_dictionary_holds(self) -> None:
        batch = self.batch
        assert sorted(batch.req_ids) == sorted(self.running())
        for row, req_id in enumerate(batch.req_ids):
            request = self.known[req_id]
            columns, sampled = batch.rows[row], batch.sampling.rows[row]
            assert batch.row_of[req_id] == row
            assert batch.token_ids[row, : columns["num_tokens"]].tolist() == request.token_ids
            assert batch.block_table[row, : columns["num_blocks"]].tolist() == request.block_ids
            assert columns["num_computed_tokens"] == request.num_computed
            assert columns["num_prompt_tokens"] == request.num_prompt_tokens
            assert sampled["stream"] == seeded_stream(request.params.seed or 0)
            assert sampled["top_k"] == request.params.top_k
            greedy = request.params.is_greedy
            assert sampled["temperature"] == (0 if greedy else request.params.temperature)


Histories.TestCase.settings = settings(
    max_examples=amount(15, thorough=1200), stateful_step_count=30, deadline=None
)
TestHistories = Histories.TestCase


@pytest.mark.parametrize("seed", some(range(20), ordinary=5))
def test_inputs_are_laid_out_as_a_plain_loop_would(seed: int) -> None:
    random = Random(seed)
    batch = InputBatch(MAX_REQS, MAX_LEN, BLOCK, VOCAB)
    builder = StepInputBuilder(batch, None, max_num_tokens=200, block_size=BLOCK, device=CPU)  # type: ignore[arg-type]
    requests = {}
    for index in range(random.randint(1, MAX_REQS)):
        tokens = [random.randrange(VOCAB) for _ in range(random.randint(1, MAX_LEN))]
        computed = random.choice([0, len(tokens) - 1, random.randrange(len(tokens))])
        blocks = random.sample(range(500), -(-len(tokens) // BLOCK))
        requests[f"r{index}"] = (tokens, computed, blocks)
    new = [NewRequestData(r, t, SamplingParams(), b, c) for r, (t, c, b) in requests.items()]
    scheduled = {
        r: random.randint(1, len(t) - c) for r, (t, c, _) in requests.items() if random.random() < 0.8
    }
    scheduled = scheduled or {"r0": 1}
    step = plan(new=new, scheduled=dict(random.sample(list(scheduled.items()), len(scheduled))))
    batch.update(step)
    inputs = builder.build(step)

    assert sorted(inputs.req_ids) == sorted(scheduled)
    counts = [scheduled[r] for r in inputs.req_ids]
    assert counts == sorted(counts, key=lambda count: count > 1)
    ids, positions, slots, starts, lengths, sampled, ends = [], [], [], [0], [], [], []
    for index, req_id in enumerate(inputs.req_ids):
        tokens, computed, blocks = requests[req_id]
        for position in range(computed, computed + scheduled[req_id]):
            ids.append(tokens[position])
            positions.append(position)
            slots.append(blocks[position // BLOCK] * BLOCK + position % BLOCK)
        starts.append(len(ids))
        lengths.append(positions[-1] + 1)
        if lengths[-1] == len(tokens):
            sampled.append(index)
            ends.append(len(ids) - 1)
    attention = inputs.attention
    assert inputs.input_ids.tolist() == ids
    assert inputs.positions.tolist() == positions
    assert attention.slot_mapping.tolist() == slots
    assert attention.query_start_loc.tolist() == starts
    assert attention.seq_lens.tolist() == lengths
    assert attention.num_reqs == len(counts)
    assert attention.num_tokens == len(ids)
    assert attention.max_query_len == max(counts)
    assert attention.max_seq_len == max(lengths)
    assert attention.num_decodes == counts.count(1)
    for req_id, row, length in zip(inputs.req_ids, attention.block_table.tolist(), lengths, strict=True):
        used = -(-length // BLOCK)
        assert row[:used] == requests[req_id][2][:used]
    assert inputs.sampled.tolist() == sampled
    assert inputs.sampled_rows.tolist() == [batch.row_of[inputs.req_ids[i]] for i in sampled]
    if inputs.logits_index is None:
        assert ends == list(range(len(ids)))
    else:
        assert inputs.logits_index.tolist() == ends


def test_tokens_outside_the_vocabulary_are_no_end_tokens() -> None:
    batch = InputBatch(MAX_REQS, MAX_LEN, BLOCK, VOCAB)
    params = SamplingParams(min_tokens=3, stop_token_ids=[VOCAB + 7, 4, 9], eos_token_id=9)
    batch.update(plan(new=[NewRequestData("a", [1, 2], params, [0], 0)]))
    rows = np.array([0])
    batch.sampling.metadata(rows)
    for _ in range(3):
        constraints = batch.sampling.constraints(rows)
        assert constraints is not None
        assert constraints.banned is not None
        assert sorted(constraints.banned.tolist()) == [4, 9]
        batch.append(rows, np.array([5]))
    assert batch.sampling.constraints(rows) is None


def test_requests_without_a_seed_repeat_with_the_engines_seed_and_differ_from_each_other() -> None:
    def drawn(seed: int) -> list[float]:
        batch = InputBatch(MAX_REQS, MAX_LEN, BLOCK, VOCAB, seed=seed)
        new = [NewRequestData(name, [1, 2], SamplingParams(), [block], 0) for block, name in enumerate("abc")]
        batch.update(plan(new=new))
        return [float(number) for number in batch.sampling.uniforms(np.arange(3))]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 6


class SetInOrder(set[str]):
    """A set that another process may have: with the same elements, in another order."""

    def __init__(self, elements: list[str]) -> None:
        super().__init__(elements)
        self._elements = elements

    def __iter__(self) -> Iterator[str]:
        return iter(self._elements)


def rows_after(leaving: set[str], *, preempted: bool) -> list[str]:
    """Five requests; three leave in one step and, if they were preempted, come back in the next."""
    batch = InputBatch(8, MAX_LEN, BLOCK, VOCAB)
    batch.update(plan(new=[NewRequestData(r, [1], SamplingParams(), [0], 0) for r in "abcde"]))
    step = plan()
    if preempted:
        step.preempted_req_ids = leaving
    else:
        step.finished_req_ids = leaving
    batch.update(step)
    if preempted:
        batch.update(plan(cached=CachedRequestData(list("abc"), leaving, [[7], [8], [9]], [0, 0, 0])))
    return batch.req_ids


@pytest.mark.parametrize("preempted", [False, True], ids=["finished", "preempted"])
def test_rows_are_the_same_in_every_process(preempted: bool) -> None:
    found = {tuple(rows_after(SetInOrder(list(o)), preempted=preempted)) for o in permutations("abc")}
    assert len(found) == 1
