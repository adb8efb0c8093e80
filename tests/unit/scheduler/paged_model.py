"""A tiny causal 'model' over a paged memory, a worker that runs plans on it, and its sequential oracle.

Like a transformer of a few layers: each layer first writes a value for every token of the batch into its slot,
then each token's next value depends on the values of all tokens up to it, read back through its request's
block table. A slot that was shared, reused or left out by mistake changes every value after it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from nbengine.scheduler.output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.unit.scheduler.fake_grammar import VOCAB_SIZE, allowed_tokens, tokens_of_mask
from tests.unit.scheduler.layered_model import (
    PLAIN,
    GrowingSequence,
    Rules,
    first_visible,
    layers_of,
    mix,
    mix_all,
    tables_of,
)

EOS = 0


def sequential_tokens(
    prompt: list[int], count: int, *, constrained: bool = False, rules: Rules = PLAIN
) -> list[int]:
    """The oracle: `count` tokens after `prompt`, computed one after another without any cache."""
    sequence = GrowingSequence(rules)
    tokens = list(prompt)
    for token in prompt:
        sequence.append(token)
    for _ in range(count):
        allowed = allowed_tokens(tokens[len(prompt) :]) if constrained else None
        tokens.append(_pick(sequence.value, allowed))
        sequence.append(tokens[-1])
    return tokens[len(prompt) :]


def _pick(value: int, allowed: list[int] | None) -> int:
    return value % VOCAB_SIZE if allowed is None else allowed[value % len(allowed)]


def sequential_value(tokens: list[int], rules: Rules = PLAIN) -> int:
    """Compute what the last layer must give for the last of `tokens`."""
    sequence = GrowingSequence(rules)
    for token in tokens:
        sequence.append(token)
    return sequence.value


class PagedMemory:
    """Slots for what each layer keeps of tokens, and for recurrent states.

    The k-th layer of every table lies in tensor k: what one table's layer writes in a block, a layer of another table
    would find there. So each value stands with its table and position. A slot whose block was handed out again is
    unreadable until it is written.
    """

    def __init__(
        self, num_blocks: int, block_size: int, rules: Rules = PLAIN, num_state_slots: int = 0
    ) -> None:
        self.block_size = block_size
        self.layers = layers_of(rules)
        self.rules = tables_of(rules)
        tables = [table for table, _ in self.layers]
        num_tensors = max(map(tables.count, range(len(self.rules))), default=0)
        self.tensors: list[list[tuple[int, int, int] | None]] = [
            [None] * (num_blocks * block_size) for _ in range(num_tensors)
        ]
        self.states: list[tuple[int, int] | None] = [None] * num_state_slots
        """The number of tokens, and what the recurrent layer has made of them."""

    def slot(self, table: list[int], number: int, position: int) -> int:
        """The place of a position in the memory, through a request's table of this number."""
        column, offset = divmod(position, self.block_size)
        block_id = table[column * len(self.rules) + number]
        assert block_id >= 0, f"table {number} has no block for position {position}"
        return block_id * self.block_size + offset

    def slots(self, table: list[int], start: int, end: int) -> list[int]:
        """The places of positions in all tables."""
        numbers = range(len(self.rules))
        return [self.slot(table, number, position) for position in range(start, end) for number in numbers]

    def forget(self, slots: list[int]) -> None:
        for tensor in self.tensors:
            for slot in slots:
                tensor[slot] = None

    def wipe(self, block_ids: list[int]) -> None:
        for tensor in self.tensors:
            for block_id in block_ids:
                if block_id >= 0:
                    start = block_id * self.block_size
                    tensor[start : start + self.block_size] = [None] * self.block_size

    def forward(self, rows: list[Row]) -> list[list[int]]:
        """Compute the new tokens of all rows, layer by layer, and return each row's values."""
        values = [list(row.tokens) for row in rows]
        met = [0] * (len(self.rules) + 1)
        for number, rule in self.layers:
            if rule.kind == "recurrent":
                self._recur(rows, values)
                continue
            tensor = self.tensors[met[number]]
            met[number] += 1
            for row, new in zip(rows, values, strict=True):
                for position, value in enumerate(new, row.start):
                    tensor[self.slot(row.table, number, position)] = (number, position, value)
            for row, new in zip(rows, values, strict=True):
                for position in range(row.start, row.end):
                    visible = range(first_visible(rule, position), position + 1)
                    new[position - row.start] = mix_all(
                        [self._read(tensor, row, number, each) for each in visible]
                    )
        return values

    def _read(self, tensor: list[tuple[int, int, int] | None], row: Row, number: int, position: int) -> int:
        slot = self.slot(row.table, number, position)
        found = tensor[slot]
        assert found is not None, f"{row.req_id} reads slot {slot}, which nobody has written"
        assert found[:2] == (number, position), f"{row.req_id} reads what is another table's or position's"
        return found[2]

    def _recur(self, rows: list[Row], values: list[list[int]]) -> None:
        """Go on from the rows' states. All are read before any is written, and the other way round would give the same."""
        sources, written = [], []
        begun = []
        for row in rows:
            begun.append(0 if row.source < 0 else self._state(row))
            if row.source != row.state_slot:
                sources.append(row.source)
        for row, new, state in zip(rows, values, begun, strict=True):
            places = dict(row.checkpoints)
            assert len(places) == len(row.checkpoints)
            for index, value in enumerate(new):
                new[index] = state = mix(state, value)
                if (slot := places.pop(row.start + index + 1, None)) is not None:
                    self.states[slot] = row.start + index + 1, state
                    written.append(slot)
            assert not places, "a checkpoint outside of the step"
            self.states[row.state_slot] = row.end, state
            written.append(row.state_slot)
        assert len(written) == len(set(written)), "two states share a slot"
        assert not set(written) & set(sources), "a state is written that a request starts from"

    def _state(self, row: Row) -> int:
        found = self.states[row.source]
        assert found is not None, f"{row.req_id} starts from slot {row.source}, which nobody has written"
        assert found[0] == row.start, (
            f"{row.req_id} starts from the state of {found[0]} tokens, not {row.start}"
        )
        return found[1]


@dataclass
class Row:
    """One request's part of a batch: its tokens from position `start` to `end`, drafts last."""

    req_id: str
    table: list[int]
    tokens: list[int]
    start: int
    end: int
    state_slot: int = -1
    source: int = -1
    checkpoints: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class _State:
    tokens: list[int]
    table: list[int]
    num_computed: int
    state_slot: int = -1


class FakeWorker:
    """Runs plans as a worker does, knowing only what the plans say, and checks each plan on the way."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rng: random.Random | None = None,
        rules: Rules = PLAIN,
        num_state_slots: int = 0,
    ) -> None:
        """With `rng`, drafts are proposed: some of the tokens that will come, then others."""
        self.memory = PagedMemory(num_blocks, block_size, rules, num_state_slots)
        self.rules = rules
        self.has_states = num_state_slots > 0
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
            self.states[req_id].state_slot = -1
        self._take_new(plan)
        self._take_cached(plan)
        drafts = plan.scheduled_spec_decode_tokens
        assert drafts.keys() <= plan.num_scheduled_tokens.keys()
        rows = [
            self._row(req_id, count, drafts.get(req_id, []))
            for req_id, count in plan.num_scheduled_tokens.items()
        ]
        self._take_states(plan, rows)
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

    def _take_states(self, plan: SchedulerOutput, rows: list[Row]) -> None:
        """Give every row the slots of its state; those that are admitted, and no others, are told theirs."""
        admitted = {
            new.req_id for new in plan.scheduled_new_reqs
        } | plan.scheduled_cached_reqs.resumed_req_ids
        assert set(plan.state_slots) == (admitted if self.has_states else set())
        assert plan.checkpoints.keys() <= plan.num_scheduled_tokens.keys()
        if not self.has_states:
            return
        for row in rows:
            state = self.states[row.req_id]
            source = state.state_slot
            if row.req_id in admitted:
                state.state_slot, source = plan.state_slots[row.req_id]
                assert (source < 0) is (row.start == 0), "only a state of no tokens starts from zeros"
            row.state_slot, row.source = state.state_slot, source
            row.checkpoints = plan.checkpoints.get(row.req_id, [])
            assert all(place % self.block_size == 0 for place, _ in row.checkpoints)

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
        self.memory.wipe(state.table[state.num_computed // self.block_size * self.num_tables :])

    @property
    def num_tables(self) -> int:
        return len(self.memory.rules)

    def _row(self, req_id: str, count: int, drafts: list[int]) -> Row:
        state = self.states[req_id]
        start, end = state.num_computed, state.num_computed + count
        assert count >= 1
        tokens = state.tokens + drafts
        assert end == len(tokens) if drafts else end <= len(tokens)
        assert end * self.num_tables <= len(state.table) * self.block_size, "tokens without slots"
        self.num_computed_tokens += count
        return Row(req_id, state.table, tokens[start:end], start, end)

    def _check_writes(self, rows: list[Row]) -> None:
        """Check that no slot is written for two tokens, and no written block is in another live request's
        table."""
        written = [slot for row in rows for slot in self.memory.slots(row.table, row.start, row.end)]
        assert len(written) == len(set(written)), "two tokens share a slot"
        holders: dict[int, set[str]] = {}
        for req_id, state in self.states.items():
            for place, block_id in enumerate(state.table):
                column, number = divmod(place, self.num_tables)
                first = first_visible(self.memory.rules[number], state.num_computed)
                # What no later query reads may be another's by now.
                if (column + 1) * self.block_size > first:
                    assert block_id >= 0, "a block that is read is missing"
                    holders.setdefault(block_id, set()).add(req_id)
        for row in rows:
            size, num_tables = self.block_size, self.num_tables
            for place in range(row.start // size * num_tables, -(-row.end // size) * num_tables):
                block_id = row.table[place]
                others = holders[block_id] - {row.req_id}
                assert all(self._reads_what(row, place, other) for other in others), (
                    "a shared block is written"
                )

    def _reads_what(self, row: Row, place: int, other: str) -> bool:
        """Return whether `other` shares the block as part of a prefix that this row computes in full right
        now."""
        end = (place // self.num_tables + 1) * self.block_size
        state = self.states[other]
        return (
            row.end >= end
            and state.num_computed >= end
            and state.table[place] == row.table[place]
            and state.tokens[:end] == self.states[row.req_id].tokens[:end]
        )

    def _sample(self, row: Row, values: list[int], drafts: list[int], allowed: list[int] | None) -> list[int]:
        """Sample after the last known token, and after each draft that is what was sampled before it."""
        state = self.states[row.req_id]
        known = len(state.tokens)
        if row.end < known:
            assert allowed is None
            assert values[-1] == sequential_value(state.tokens[: row.end], self.rules)
            state.num_computed = row.end
            return []
        sampled: list[int] = []
        for value, draft in zip(values[known - 1 - row.start :], [*drafts, None], strict=True):
            assert value == sequential_value(state.tokens, self.rules), f"{row.req_id} computed a wrong value"
            state.tokens.append(_pick(value, allowed))
            sampled.append(state.tokens[-1])
            if draft != state.tokens[-1]:
                break
        state.num_computed = len(state.tokens) - 1
        self.memory.forget(self.memory.slots(row.table, state.num_computed, row.end))
        return sampled

    def _draft(self, rows: list[Row]) -> dict[str, list[int]] | None:
        rng = self._rng
        if rng is None:
            return None
        proposed = {}
        for row in rows:
            if rng.random() < 0.8:
                tokens = self.states[row.req_id].tokens
                right = sequential_tokens(tokens, rng.randrange(4), rules=self.rules)
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
