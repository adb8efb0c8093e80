"""The table of penalties against transformers' processor and a few lines of numpy, whatever happens to its rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from transformers import RepetitionPenaltyLogitsProcessor

from nbengine.sampling import penalties as penalties_module
from nbengine.sampling.penalties import PenaltyRows, PenaltyTable
from nbengine.sampling_params import SamplingParams
from tests.support.thorough import amount

MAX_ROWS, VOCAB = 6, 40
CPU = torch.device("cpu")

penalties = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.6, -1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6]),
)


@dataclass
class Expected:
    params: SamplingParams
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def penalised(self, logits: np.ndarray) -> np.ndarray:
        ids = torch.tensor([self.prompt + self.output], dtype=torch.int64)
        scores = torch.from_numpy(logits)[None].clone()
        if ids.numel():
            processor = RepetitionPenaltyLogitsProcessor(float(self.params.repetition_penalty))
            scores = processor(ids, scores)
        counts = np.bincount(self.output, minlength=VOCAB).astype(np.float32)
        changed = scores[0].numpy() - counts * np.float32(self.params.frequency_penalty)
        return changed - (counts > 0) * np.float32(self.params.presence_penalty)


class Rows(RuleBasedStateMachine):
    """Rows come, get tokens, move and leave; the logits change as a plain list of each row's tokens says."""

    @initialize(compiled=st.booleans())
    def choose(self, compiled: bool) -> None:
        """Choose compiled kernels or plain torch, which is what runs on a GPU."""
        if not compiled:
            patch = mock.patch.object(penalties_module, "select_penalties", return_value=None)
            patch.start()
            self.patches.append(patch)

    def teardown(self) -> None:
        for patch in self.patches:
            patch.stop()

    def __init__(self) -> None:
        super().__init__()
        self.patches: list[Any] = []
        self.table = PenaltyTable(MAX_ROWS, VOCAB, CPU)
        self.rows: dict[int, Expected] = {}
        self.random = np.random.default_rng(0)

    @precondition(lambda self: len(self.rows) < MAX_ROWS)
    @rule(
        params=penalties,
        prompt=st.lists(st.integers(0, VOCAB - 1), max_size=60),
        output=st.lists(st.integers(0, VOCAB - 1), max_size=30),
        data=st.data(),
    )
    def add(self, params: SamplingParams, prompt: list[int], output: list[int], data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in range(MAX_ROWS) if row not in self.rows]))
        self.rows[row] = Expected(params, prompt, list(output))
        self.table.add(row, params, np.array(prompt, np.int32), np.array(output, np.int32))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.rows)))
        del self.rows[row]
        self.table.remove(row)

    @precondition(lambda self: 0 < len(self.rows) < MAX_ROWS)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(sorted(self.rows)))
        target = data.draw(st.sampled_from([row for row in range(MAX_ROWS) if row not in self.rows]))
        self.rows[target] = self.rows.pop(source)
        self.table.move(source, target)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), steps=st.integers(1, 40), low=st.integers(0, VOCAB - 1))
    def sample(self, data: st.DataObject, steps: int, low: int) -> None:
        chosen = data.draw(st.permutations(sorted(self.rows)))
        chosen = chosen[: data.draw(st.integers(1, len(chosen)))]
        count = len(chosen) + data.draw(st.integers(0, 2))
        positions = np.sort(self.random.permutation(count)[: len(chosen)])
        rows = PenaltyRows.build(self.table, np.array(chosen), positions, count, CPU)
        for _ in range(steps):
            logits = (self.random.standard_normal((count, VOCAB)) * 4).astype(np.float32)
            found = torch.from_numpy(logits.copy())
            self.table.apply(found, rows)
            expected = logits.copy()
            for row, position in zip(chosen, positions, strict=True):
                expected[position] = self.rows[row].penalised(logits[position])
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)
            tokens = self.random.integers(low, VOCAB, len(chosen))
            self.table.expect(rows)
            self.table.make_room(rows)
            self.table.append(rows, torch.from_numpy(tokens))
            for row, token in zip(chosen, tokens.tolist(), strict=True):
                self.rows[row].output.append(token)


Rows.TestCase.settings = settings(
    max_examples=amount(15, thorough=1000), stateful_step_count=12, deadline=None
)
TestRows = Rows.TestCase


@pytest.mark.parametrize("compiled", [True, False])
def test_forbidden_tokens_stay_forbidden(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(penalties_module, "select_penalties", lambda _: None)
    table = PenaltyTable(1, VOCAB, CPU)
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=-2, presence_penalty=-2)
    table.add(0, params, np.array([3], np.int32), np.array([4, 4], np.int32))
    logits = torch.full((1, VOCAB), -torch.inf)
    table.apply(logits, PenaltyRows.build(table, np.array([0]), np.array([0]), 1, CPU))
    assert (logits == -torch.inf).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 500])
def test_long_lists_leave_no_trace_in_the_width_of_those_after_them(length: int) -> None:
    table = PenaltyTable(2, 1000, CPU)
    params = SamplingParams(repetition_penalty=1.5)
    table.add(0, params, np.arange(length, dtype=np.int32), np.array([], np.int32))
    wide = table._width
    assert wide > length
    table.add(1, params, np.arange(3, dtype=np.int32), np.array([], np.int32))
    table.remove(0)
    assert table._width == 2 * 16
    assert len(table) == 1


def test_a_table_stays_as_it_is_where_the_checkpoint_refuses_what_there_is_memory_for() -> None:
    """It is how the tables of several ranks stay alike, one of which had too little memory."""
    refused: list[str] = []

    def checkpoint() -> None:
        if refused:
            raise MemoryError(refused[0])

    def state() -> tuple[object, ...]:
        return len(table), table._width, table._num_entries.tolist(), table._index.shape

    table = PenaltyTable(2, 500, CPU, checkpoint=checkpoint)
    words = np.arange(20, dtype=np.int32)
    table.add(0, SamplingParams(repetition_penalty=1.5), words, words[:0])
    rows = PenaltyRows.build(table, np.arange(1), np.arange(1), 1, CPU)
    while not table.is_full:
        table.expect(rows)
    before = state()
    refused.append("another rank")
    with pytest.raises(MemoryError, match="another rank"):
        table.make_room(rows)
    assert state() == before
    refused.clear()
    table.make_room(rows)
    assert table._num_entries.tolist() == [21, 0]
    before = state()
    refused.append("another rank")
    many = np.arange(300, dtype=np.int32)
    with pytest.raises(MemoryError, match="another rank"):
        table.add(1, SamplingParams(repetition_penalty=1.5), many, many[:0])
    assert state() == before
