"""The block pool against a reference of plain lists, and its own audit against planted faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.errors import NBEngineError
from nbengine.kv_cache.block_pool import BlockPool
from tests.support.thorough import amount
from tests.unit.scheduler.reference_pool import ReferencePool


class PoolHistories(RuleBasedStateMachine):
    """Tables of blocks are taken, shared, registered under one of few contents, and freed in any order."""

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.reference = ReferencePool(num_blocks, lambda content: None)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count > self.reference.num_free():
            with pytest.raises(NBEngineError, match=f"{count} KV blocks wanted"):
                self.pool.allocate(count)
            return
        table = self.pool.allocate(count)
        assert table == [self.reference.take_one() for _ in range(count)]
        self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), content=st.integers(0, 6))
    def register(self, data: st.DataObject, content: int) -> None:
        held = sorted({block for table in self.tables for block in table})
        block = data.draw(st.sampled_from(held))
        contents = self.reference.contents
        if contents[block] is not None:
            return
        if content in contents:
            duplicate = contents.index(content)
            contents[duplicate] = None
            if self.reference.holders[duplicate] == 0:
                self.reference.least_recent_first.remove(duplicate)
                self.reference.blank.append(duplicate)
        contents[block] = content
        self.pool.register(block, b"%d" % content)

    @rule(wanted=st.lists(st.integers(0, 6), max_size=4, unique=True))
    def share(self, wanted: list[int]) -> None:
        expected: list[int] = []
        for content in wanted:
            if content not in self.reference.contents:
                break
            expected.append(self.reference.contents.index(content))
        found = self.pool.find_prefix([b"%d" % content for content in wanted])
        assert found == expected
        assert self.pool.count_free(found) == sum(self.reference.holders[block] == 0 for block in found)
        self.pool.take(found)
        for block in found:
            self.reference.share_one(block)
        self.tables.append(found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(reversed(table))
        for block in reversed(table):
            self.reference.free_one(block)

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget_all() == self.reference.forget_all()

    @invariant()
    def agrees_with_the_reference(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_integrity(self.tables)
        assert [self.pool.ref_count(block) for block in range(self.pool.num_blocks)] == self.reference.holders
        assert self.pool.num_free_blocks == self.reference.num_free()
        assert self.pool.num_cached_blocks == self.reference.num_cached()

    def teardown(self) -> None:
        for table in getattr(self, "tables", []):
            self.pool.free(table)
        assert not hasattr(self, "pool") or self.pool.num_free_blocks == self.pool.num_blocks


TestPoolHistories = PoolHistories.TestCase
TestPoolHistories.settings = settings(
    max_examples=amount(60, thorough=3000), stateful_step_count=40, deadline=None
)


def cached_pool() -> tuple[BlockPool, list[int]]:
    """A pool of four: one table of two cached blocks, one cached free block, one blank block."""
    pool = BlockPool(4)
    table = pool.allocate(2)
    other = pool.allocate(1)
    for block in table + other:
        pool.register(block, b"%d" % block)
    pool.free(other)
    return pool, table


def test_blank_blocks_are_handed_out_before_cached_ones_and_those_least_recently_used_first() -> None:
    pool = BlockPool(4)
    old, new = pool.allocate(1), pool.allocate(1)
    pool.register(old[0], b"old")
    pool.register(new[0], b"new")
    pool.free(old)
    pool.free(new)
    assert set(pool.allocate(2)).isdisjoint(old + new)
    assert pool.num_cached_blocks == 2
    assert pool.allocate(1) == old
    assert pool.find_prefix([b"old"]) == []
    assert pool.find_prefix([b"new"]) == new


def test_a_block_that_is_freed_twice_is_an_error() -> None:
    pool, table = cached_pool()
    pool.free(table)
    with pytest.raises(NBEngineError, match="freed twice"):
        pool.free(table[:1])


def test_a_failed_allocation_leaves_the_pool_as_it_was() -> None:
    pool, table = cached_pool()
    with pytest.raises(NBEngineError, match="3 KV blocks wanted, 2 of 4 are free"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    assert pool.num_cached_blocks == 3
    pool.check_integrity([table])


def _leak(pool: BlockPool, table: list[int]) -> None:
    pool.allocate(1)


def _lose(pool: BlockPool, table: list[int]) -> None:
    pool._blank.clear()


def _free_twice(pool: BlockPool, table: list[int]) -> None:
    pool._blank.append(pool._blank[0])


def _free_a_held_block(pool: BlockPool, table: list[int]) -> None:
    pool._blank.append(table[0])


def _keep_a_cached_block_among_the_blank(pool: BlockPool, table: list[int]) -> None:
    pool._blank.append(pool._evictable.popitem()[0])


def _lose_a_hash(pool: BlockPool, table: list[int]) -> None:
    pool._hashes[table[0]] = None


def _find_a_wrong_block(pool: BlockPool, table: list[int]) -> None:
    pool._block_of[b"0"] = table[1]


@pytest.mark.parametrize(
    "plant",
    [
        _leak,
        _lose,
        _free_twice,
        _free_a_held_block,
        _keep_a_cached_block_among_the_blank,
        _lose_a_hash,
        _find_a_wrong_block,
    ],
)
def test_the_audit_finds_a_planted_fault(plant: Callable[[BlockPool, list[int]], None]) -> None:
    pool, table = cached_pool()
    pool.check_integrity([table])
    plant(pool, table)
    with pytest.raises(NBEngineError):
        pool.check_integrity([table])
