"""A mirror that follows the stream of events knows the prefix cache's index, whatever happens and whenever it comes."""

from __future__ import annotations

from hashlib import sha256

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.kv_cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheMirror,
    KVCacheSnapshot,
    KVEventBatch,
    KVEventStream,
    KVMessage,
)
from nbengine.kv_cache.prefix import group_key
from nbengine.kv_cache.specs import make_groups
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.request import Request, RequestStatus
from nbengine.scheduler.scheduler import Scheduler
from tests.support.thorough import amount
from tests.unit.scheduler.layered_model import PLAIN, Rules
from tests.unit.scheduler.mixtures import MIXTURES, STATE
from tests.unit.scheduler.paged_model import FakeWorker

BLOCK_SIZE = 2
RULES = [PLAIN, PLAIN, MIXTURES["full and window"], MIXTURES["window"], MIXTURES["all"]]
_decoder = msgspec.msgpack.Decoder(KVEventBatch | KVCacheSnapshot)


def over_the_wire(message: KVMessage) -> KVMessage:
    return _decoder.decode(msgspec.msgpack.encode(message))


def chained(event: BlockStored) -> list[bytes]:
    """Compute the hashes that the event's tokens must have."""
    parent = event.parent_block_hash
    if parent is None:
        parent = sha256(b"()").digest()
    hashes = []
    for start in range(0, len(event.token_ids), event.block_size):
        block = event.token_ids[start : start + event.block_size]
        data = b"".join(token.to_bytes(4, "little") for token in block)
        parent = sha256(data + parent).digest()
        hashes.append(parent)
    return hashes


class EventHistories(RuleBasedStateMachine):
    """A scheduler lives on; followers come at any time, and one of them may miss batches."""

    @initialize(num_blocks=st.integers(6, 12), rules=st.sampled_from(RULES))
    def start(self, num_blocks: int, rules: Rules) -> None:
        config, cache = (
            SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=8),
            CacheConfig(block_size=BLOCK_SIZE),
        )
        groups, num_slots = make_groups(rules), 5 if STATE in rules else 0
        num_blocks *= groups.num_tables
        options = SchedulerOptions(groups=groups, num_state_slots=num_slots)
        self.scheduler = Scheduler(config, cache, num_blocks, 12, options=options)
        self.worker = FakeWorker(num_blocks, BLOCK_SIZE, None, rules, num_slots)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.stream = KVEventStream(self.pool, BLOCK_SIZE, 3, groups.num_tables)
        self.mirrors: list[KVCacheMirror] = []
        self.num_added = 0
        self.recording = False
        self.last_seq = 0
        self.published = True

    @rule()
    def someone_subscribes(self) -> None:
        self.stream.record(True)
        self.recording = True
        snapshot = over_the_wire(self.stream.snapshot(1.0))
        assert isinstance(snapshot, KVCacheSnapshot)
        assert (snapshot.engine_index, snapshot.num_blocks) == (3, self.pool.num_blocks)
        mirror = KVCacheMirror()
        assert mirror.apply(snapshot)
        self.mirrors.append(mirror)

    @precondition(lambda self: getattr(self, "recording", False))
    @rule()
    def everyone_leaves(self) -> None:
        self.stream.record(False)
        self.recording = False
        self.mirrors.clear()
        assert self.stream.take_batch(0.0) is None
        # A follower that has known the state so far must not take the next snapshot for the same one.
        self.last_seq += 1
        assert self.stream.snapshot(1.0).seq == self.last_seq

    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=9), max_tokens=st.integers(1, 3))
    def add(self, prompt: list[int], max_tokens: int) -> None:
        hasher = self.scheduler.kv_cache_manager.block_hasher
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(f"r{self.num_added}", prompt, params, block_hasher=hasher))
        self.num_added += 1
        self.published = False

    @rule(count=st.integers(1, 3))
    def steps(self, count: int) -> None:
        for _ in range(count):
            plan = self.scheduler.schedule()
            self.scheduler.update_from_output(plan, self.worker.execute(plan))
        self.published = False

    @precondition(lambda self: getattr(self, "num_added", 0))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(0, self.num_added - 1))
        self.scheduler.finish_requests(f"r{number}", RequestStatus.FINISHED_ABORTED)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.published = False

    @rule(lose=st.booleans())
    def publish(self, lose: bool) -> None:
        self.published = True
        batch = self.stream.take_batch(2.0)
        if batch is None:
            return
        assert batch.seq == self.last_seq + 1
        self.last_seq = batch.seq
        received = over_the_wire(batch)
        assert isinstance(received, KVEventBatch)
        for event in received.events:
            if isinstance(event, BlockStored):
                keys = [group_key(block_hash, event.group) for block_hash in chained(event)]
                assert keys == event.block_hashes
                assert len(event.block_ids) == len(event.block_hashes) > 0
            assert not isinstance(event, BlockRemoved) or event.block_hashes
        for number, mirror in enumerate(self.mirrors):
            if lose and number == 0:
                mirror.seq = None if mirror.seq is None else mirror.seq - 1
            if not mirror.apply(received):
                assert mirror.seq is None
                assert not mirror.apply(received)
                mirror.apply(over_the_wire(self.stream.snapshot(3.0)))

    @invariant()
    def mirrors_agree_with_the_index(self) -> None:
        if getattr(self, "published", False):
            for mirror in self.mirrors:
                assert mirror.blocks == self.pool.cached_blocks()


TestEventHistories = EventHistories.TestCase
TestEventHistories.settings = settings(
    max_examples=amount(60, thorough=3000), stateful_step_count=50, deadline=None
)


def test_removals_one_after_another_are_one_event_and_a_reset_is_another() -> None:
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(block_size=BLOCK_SIZE), 4, 8)
    manager = scheduler.kv_cache_manager
    stream = KVEventStream(manager.block_pool, BLOCK_SIZE, 0)
    stream.record(True)
    first = Request("a", [1, 2, 3, 4, 5], SamplingParams(), block_hasher=manager.block_hasher)
    manager.allocate_slots(first, 5)
    first.num_computed_tokens = 5
    manager.cache_blocks(first)
    hashes = list(first.block_hashes)
    manager.free(first)
    manager.block_pool.allocate(4)
    batch = stream.take_batch(7.5)
    assert batch is not None
    stored, removed = batch.events
    assert stored == BlockStored(hashes, None, [1, 2, 3, 4], BLOCK_SIZE, [0, 1])
    # The last block of a prefix goes first.
    assert removed == BlockRemoved(hashes[::-1])
    assert (batch.ts, batch.engine_index, batch.seq) == (7.5, 0, 1)
    manager.block_pool.free([0, 1, 2, 3])
    manager.reset_prefix_cache()
    again = stream.take_batch(8.0)
    assert again is not None
    assert again.events == [AllBlocksCleared()]
    assert stream.take_batch(8.0) is None


def test_nothing_is_recorded_while_nobody_wants_it() -> None:
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(block_size=BLOCK_SIZE), 4, 8)
    pool = scheduler.kv_cache_manager.block_pool
    stream = KVEventStream(pool, BLOCK_SIZE, 0)
    pool.forget_all()
    assert pool.observers == ()
    assert stream.take_batch(0.0) is None
    stream.record(True)
    stream.record(True)
    assert len(pool.observers) == 1
    pool.forget_all()
    stream.record(False)
    assert pool.observers == ()
    assert stream.take_batch(0.0) is None


def test_blocks_of_every_group_are_stored_under_keys_of_their_own() -> None:
    groups = make_groups(MIXTURES["full and window"])
    options = SchedulerOptions(groups=groups)
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(block_size=BLOCK_SIZE), 8, 8, options=options)
    manager = scheduler.kv_cache_manager
    stream = KVEventStream(manager.block_pool, BLOCK_SIZE, 0, groups.num_tables)
    mirror = KVCacheMirror()
    mirror.apply(stream.snapshot(0.0))
    stream.record(True)
    request = Request("a", [1, 2, 3, 4, 5], SamplingParams(), block_hasher=manager.block_hasher)
    scheduler.add_request(request)
    scheduler.schedule()
    batch = stream.take_batch(1.0)
    assert batch is not None
    first, second = request.block_hashes
    assert batch.events == [
        BlockStored([first], None, [1, 2], BLOCK_SIZE, [0], 0),
        BlockStored([group_key(first, 1)], None, [1, 2], BLOCK_SIZE, [1], 1),
        BlockStored([second], first, [3, 4], BLOCK_SIZE, [2], 0),
        BlockStored([group_key(second, 1)], first, [3, 4], BLOCK_SIZE, [3], 1),
    ]
    assert mirror.apply(batch)
    assert mirror.blocks == manager.block_pool.cached_blocks()
