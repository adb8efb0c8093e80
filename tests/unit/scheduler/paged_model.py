"""A tiny causal 'model' over a paged memory, a worker that runs plans on it, and its sequential oracle.

Like a transformer of two layers: each layer first writes a value for every token of the batch into its slot,
then each token's next value depends on the values of all tokens up to it, read back through its request's
block table. A slot that was shared, reused or left out by mistake changes every value after it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.unit.scheduler.fake_grammar import VOCAB_SIZE, allowed_tokens, tokens_of_mask

EOS = 0
_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return ((state ^ value) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % _MASK


def sequential_tokens(prompt: list[int], count: int, *, constrained: bool = False) -> list[int]:
    """The oracle: `count` tokens after `prompt`, computed one after another without any cache."""
    first = second = 0
    tokens = list(prompt)
    for token in prompt:
        first = _mix(first, token)
        second = _mix(second, first)
    for _ in range(count):
        tokens.append(_pick(second, allowed_tokens(tokens[len(prompt) :]) if constrained else None))
        first = _mix(first, tokens[-1])
        second = _mix(second, first)
    return tokens[len(prompt) :]


def _pick(value: int, allowed: list[int] | None) -> int:
    return value % VOCAB_SIZE if allowed is None else allowed[value % len(allowed)]


def sequential_value(tokens: list[int]) -> int:
    """What the second layer must give for the last of `tokens`."""
    first = second = 0
    for token in tokens:
        first = _mix(first, token)
        second = _mix(second, first)
    return second


class PagedMemory:
    """Two layers of slots; a slot whose block was handed out anew is unreadable until it is written."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.layers: list[list[int | None]] = [[None] * (num_blocks * block_size) for _ in range(2)]

    def slots(self, table: list[int], end: int) -> list[int]:
        size = self.block_size
        return [table[position // size] * size + position % size for position in range(end)]

    def forget(self, slots: list[int]) -> None:
        for layer in self.layers:
            for slot in slots:
                layer[slot] = None

    def wipe(self, block_ids: list[int]) -> None:
        for layer in self.layers:
            for block_id in block_ids:
                start = block_id * self.block_size
                layer[start : start + self.block_size] = [None] * self.block_size

    def forward(self, rows: list[Row]) -> list[list[int]]:
        """Compute the new tokens of all rows, layer by layer, and return each row's values."""
        tables = [self.slots(row.table, row.end) for row in rows]
        values = [list(row.tokens) for row in rows]
        for layer in self.layers:
            for row, slots, new in zip(rows, tables, values, strict=True):
                for slot, value in zip(slots[row.start :], new, strict=True):
                    layer[slot] = value
            for row, slots, new in zip(rows, tables, values, strict=True):
                state = 0
                for position, slot in enumerate(slots):
                    value = layer[slot]
                    assert value is not None, f"{row.req_id} reads slot {slot}, which nobody has written"
                    state = _mix(state, value)
                    if position >= row.start:
                        new[position - row.start] = state
        return values


@dataclass
class Row:
    """One request's part of a batch: its tokens from position `start` to `end`, drafts last."""

    req_id: str
    table: list[int]
    tokens: list[int]
    start: int
    end: int


@dataclass
class _State:
    tokens: list[int]
    table: list[int]
    num_computed: int


class FakeWorker:
    """Runs plans as a worker does, knowing only what the plans say, and checks each plan on the way."""

    def __init__(self, num_blocks: int, block_size: int, rng: random.Random | None = None) -> None:
        """With `rng`, drafts are proposed: some of the tokens that will come, then others."""
        self.memory = PagedMemory(num_blocks, block_size)
        self.block_size = block_size
        self.states: dict[str, _State] = {}
        self.num_computed_tokens = 0
        self._rng = rng

    def execute(
        self, plan: SchedulerOutput, grammar_output: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        for req_id in plan.finished_req_ids:
            self.states.pop(req_id, None)
        for req_id in plan.preempted_req_ids:
            resumed = req_id in plan.scheduled_cached_reqs.resumed_req_ids
            assert resumed == (req_id in plan.num_scheduled_tokens)
            self.states[req_id].table = []
        self._take_new(plan)
        self._take_cached(plan)
        drafts = plan.scheduled_spec_decode_tokens
        assert drafts.keys() <= plan.num_scheduled_tokens.keys()
        rows = [
            self._row(req_id, count, drafts.get(req_id, []))
            for req_id, count in plan.num_scheduled_tokens.items()
        ]
        self._check_writes(rows)
        values = self.memory.forward(rows)
        allowed = {}
        if grammar_output is not None:
            assert plan.has_structured_output_requests
            for number, req_id in enumerate(grammar_output.req_ids):
                allowed[req_id] = tokens_of_mask(grammar_output.bitmask, number)
        sampled = [
            self._sample(row, new, drafts.get(row.req_id, []), allowed.pop(row.req_id, None))
            for row, new in zip(rows, values, strict=True)
        ]
        assert not allowed, "masks of requests that get no token"
        assert {r.req_id for r, tokens in zip(rows, sampled, strict=True) if not tokens} == (
            plan.incomplete_req_ids
        )
        return ModelRunnerOutput([row.req_id for row in rows], sampled, draft_token_ids=self._draft(rows))

    def _take_new(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.states, "a new request that the worker knows already"
            assert new.req_id in plan.num_scheduled_tokens
            # The block table is kept, not copied: it must be the worker's own to extend.
            self.states[new.req_id] = _State(list(new.token_ids), new.block_ids, new.num_computed_tokens)
            self._wipe_uncomputed(self.states[new.req_id])

    def _take_cached(self, plan: SchedulerOutput) -> None:
        cached = plan.scheduled_cached_reqs
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for req_id, new_block_ids, num_computed in columns:
            assert req_id in plan.num_scheduled_tokens
            state = self.states[req_id]
            if req_id in cached.resumed_req_ids:
                assert not state.table, "a resumed request that was never preempted"
                assert new_block_ids is not None
                state.table = new_block_ids
                state.num_computed = num_computed
                self._wipe_uncomputed(state)
            else:
                assert state.num_computed == num_computed
                assert new_block_ids != []
                state.table.extend(new_block_ids or [])
                self.memory.wipe(new_block_ids or [])
        assert cached.resumed_req_ids <= set(cached.req_ids)

    def _wipe_uncomputed(self, state: _State) -> None:
        assert state.num_computed % self.block_size == 0
        self.memory.wipe(state.table[state.num_computed // self.block_size :])

    def _row(self, req_id: str, count: int, drafts: list[int]) -> Row:
        state = self.states[req_id]
        start, end = state.num_computed, state.num_computed + count
        assert count >= 1
        tokens = state.tokens + drafts
        assert end == len(tokens) if drafts else end <= len(tokens)
        assert end <= len(state.table) * self.block_size, "tokens without slots"
        self.num_computed_tokens += count
        return Row(req_id, state.table, tokens[start:end], start, end)

    def _check_writes(self, rows: list[Row]) -> None:
        """No slot is written for two tokens, and no written block is in another live request's table."""
        written = [slot for row in rows for slot in self.memory.slots(row.table, row.end)[row.start :]]
        assert len(written) == len(set(written)), "two tokens share a slot"
        holders: dict[int, set[str]] = {}
        for req_id, state in self.states.items():
            for block_id in state.table:
                holders.setdefault(block_id, set()).add(req_id)
        for row in rows:
            size = self.block_size
            for index in range(row.start // size, -(-row.end // size)):
                block_id = row.table[index]
                others = holders[block_id] - {row.req_id}
                assert all(self._reads_what(row, index, other) for other in others), (
                    "a shared block is written"
                )

    def _reads_what(self, row: Row, index: int, other: str) -> bool:
        """Whether `other` shares the block as part of a prefix that this row computes in full right now."""
        end = (index + 1) * self.block_size
        state = self.states[other]
        return (
            row.end >= end
            and state.num_computed >= end
            and state.table[index] == row.table[index]
            and state.tokens[:end] == self.states[row.req_id].tokens[:end]
        )

    def _sample(self, row: Row, values: list[int], drafts: list[int], allowed: list[int] | None) -> list[int]:
        """Sample after the last known token, and after each draft that is what was sampled before it."""
        state = self.states[row.req_id]
        known = len(state.tokens)
        if row.end < known:
            assert allowed is None
            assert values[-1] == sequential_value(state.tokens[: row.end])
            state.num_computed = row.end
            return []
        sampled: list[int] = []
        for value, draft in zip(values[known - 1 - row.start :], [*drafts, None], strict=True):
            assert value == sequential_value(state.tokens), f"{row.req_id} computed a wrong value"
            state.tokens.append(_pick(value, allowed))
            sampled.append(state.tokens[-1])
            if draft != state.tokens[-1]:
                break
        state.num_computed = len(state.tokens) - 1
        self.memory.forget(self.memory.slots(row.table, row.end)[state.num_computed :])
        return sampled

    def _draft(self, rows: list[Row]) -> dict[str, list[int]] | None:
        rng = self._rng
        if rng is None:
            return None
        proposed = {}
        for row in rows:
            if rng.random() < 0.8:
                right = sequential_tokens(self.states[row.req_id].tokens, rng.randrange(4))
                proposed[row.req_id] = right + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(3))]
        return proposed


class NonSamplingStage:
    """A pipeline stage that does not sample: of outputs it knows what the plans tell it, and each time that all."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}

    def take(self, plan: SchedulerOutput) -> dict[str, list[int]]:
        """The tokens, drafts apart, that a plan has it compute, by request."""
        for req_id in plan.finished_req_ids:
            self.tokens.pop(req_id, None)
        cached = plan.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.tokens
            self.tokens[new.req_id] = list(new.token_ids)
            starts[new.req_id] = new.num_computed_tokens
        assert cached.new_token_ids.keys() <= set(cached.req_ids)
        for req_id, token_ids in cached.new_token_ids.items():
            assert token_ids
            self.tokens[req_id] += token_ids
        computed = {}
        for req_id, count in plan.num_scheduled_tokens.items():
            end = starts[req_id] + count - len(plan.scheduled_spec_decode_tokens.get(req_id, ()))
            assert end <= len(self.tokens[req_id]), f"{req_id}: tokens that the stage does not know"
            computed[req_id] = self.tokens[req_id][starts[req_id] : end]
        return computed
