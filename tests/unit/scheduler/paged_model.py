"""A tiny causal 'model' over a paged memory, a worker that runs plans on it, and its sequential oracle.

Like a transformer of two layers: each layer first writes a value for every token of the batch into its slot,
then each token's next value depends on the values of all tokens up to it, read back through its request's
block table. A slot that was shared, reused or left out by mistake changes every value after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput

VOCAB_SIZE = 24
EOS = 0
_MASK = (1 << 61) - 1


def _mix(state: int, value: int) -> int:
    return ((state ^ value) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) % _MASK


def sequential_tokens(prompt: list[int], count: int) -> list[int]:
    """The oracle: `count` tokens after `prompt`, computed one after another without any cache."""
    first = second = 0
    tokens = list(prompt)
    for token in prompt:
        first = _mix(first, token)
        second = _mix(second, first)
    for _ in range(count):
        tokens.append(second % VOCAB_SIZE)
        first = _mix(first, tokens[-1])
        second = _mix(second, first)
    return tokens[len(prompt) :]


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

    def wipe(self, block_ids: list[int]) -> None:
        for layer in self.layers:
            for block_id in block_ids:
                start = block_id * self.block_size
                layer[start : start + self.block_size] = [None] * self.block_size

    def forward(self, rows: list[Row]) -> list[int]:
        """Compute the new tokens of all rows, layer by layer, and return each row's last value."""
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
        return [new[-1] for new in values]


@dataclass
class Row:
    """One request's part of a batch: its tokens from position `start` to `end`."""

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

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.memory = PagedMemory(num_blocks, block_size)
        self.block_size = block_size
        self.states: dict[str, _State] = {}
        self.num_computed_tokens = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        for req_id in plan.finished_req_ids:
            self.states.pop(req_id, None)
        for req_id in plan.preempted_req_ids:
            resumed = req_id in plan.scheduled_cached_reqs.resumed_req_ids
            assert resumed or req_id not in plan.num_scheduled_tokens
            self.states[req_id].table = []
        self._take_new(plan)
        self._take_cached(plan)
        rows = [self._row(req_id, count) for req_id, count in plan.num_scheduled_tokens.items()]
        self._check_writes(rows)
        values = self.memory.forward(rows)
        sampled = [self._sample(row, value) for row, value in zip(rows, values, strict=True)]
        return ModelRunnerOutput(req_ids=[row.req_id for row in rows], sampled_token_ids=sampled)

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

    def _row(self, req_id: str, count: int) -> Row:
        state = self.states[req_id]
        start, end = state.num_computed, state.num_computed + count
        assert count >= 1
        assert end <= len(state.tokens)
        assert end <= len(state.table) * self.block_size, "tokens without slots"
        self.num_computed_tokens += count
        return Row(req_id, state.table, state.tokens[start:end], start, end)

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

    def _sample(self, row: Row, value: int) -> list[int]:
        state = self.states[row.req_id]
        state.num_computed = row.end
        assert value == sequential_value(state.tokens[: row.end]), f"{row.req_id} computed a wrong value"
        if row.end < len(state.tokens):
            return []
        token = value % VOCAB_SIZE
        state.tokens.append(token)
        return [token]
