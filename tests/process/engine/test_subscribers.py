"""A follower of an engine's prefix cache knows it exactly, or knows that it does not; the engine never
waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from process_support.engine_under_test import EngineUnderTest
from process_support.raw_client import DEADLINE, RawClient

from nbengine.client.observe.stats_subscriber import RECEIVE_HWM, StatsSubscriber
from nbengine.config import CacheConfig
from nbengine.kv_cache.events import KVCacheMirror, KVCacheSnapshot, KVEventBatch
from nbengine.metrics.stats import EngineStats

KNOBS = {"max_position_embeddings": 4096, "vocab_size": 100_000}
Follow = Callable[[EngineUnderTest], StatsSubscriber]


@pytest.fixture
def follow(no_leftovers: None) -> Iterator[Follow]:
    """Subscribe to an engine's statistics and events."""
    subscribers: list[StatsSubscriber] = []

    def start(engine: EngineUnderTest) -> StatsSubscriber:
        subscribers.append(StatsSubscriber(engine.info, kv_events=True))
        return subscribers[-1]

    yield start
    for subscriber in subscribers:
        subscriber.close()


def snapshot(client: RawClient) -> KVCacheSnapshot:
    """The engine's present state, by the other way: a utility call."""
    failure, answer = client.call("kv_cache_snapshot")
    assert failure is None
    return msgspec.convert(answer, KVCacheSnapshot)


def index_of(message: KVCacheSnapshot) -> dict[bytes, int]:
    return dict(zip(message.block_hashes, message.block_ids, strict=True))


class Follower:
    """A subscriber with its mirror, and all kinds of messages that it has seen."""

    def __init__(self, subscriber: StatsSubscriber) -> None:
        self.subscriber = subscriber
        self.mirror = KVCacheMirror()
        self.stats: EngineStats | None = None
        self.num_snapshots = 0

    def read_until(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {DEADLINE} s"
            self.take(self.subscriber.poll(0.05))

    def take(self, message: object) -> None:
        match message:
            case EngineStats():
                self.stats = message
            case KVCacheSnapshot() | KVEventBatch():
                self.num_snapshots += isinstance(message, KVCacheSnapshot)
                assert self.mirror.apply(message), "the subscriber let a gap through"

    def expect(self, client: RawClient) -> None:
        """Follow until the mirror is what the engine says that it has."""
        truth = snapshot(client)
        self.read_until(lambda: (self.mirror.seq or 0) >= truth.seq, f"batch {truth.seq}")
        assert self.mirror.blocks == index_of(truth)


def start(start_engine, num_blocks: int = 40) -> tuple[EngineUnderTest, RawClient]:
    engine = start_engine(KNOBS, cache=CacheConfig(num_gpu_blocks_override=num_blocks, block_size=4))
    engine.wait_ready()
    return engine, engine.client().attach()


def generate(client: RawClient, name: str, length: int, max_tokens: int = 8) -> None:
    client.add(name, [1000 * len(client.outputs) + n for n in range(length)], max_tokens=max_tokens)
    client.wait_finished(name)


def test_a_follower_knows_the_index_across_evictions_resets_and_sleep(start_engine, follow: Follow) -> None:
    engine, client = start(start_engine)
    generate(client, "before", 30)
    follower = Follower(follow(engine))
    follower.read_until(lambda: follower.mirror.seq is not None, "a snapshot")
    assert len(follower.mirror.blocks) >= 7
    for number in range(10):
        generate(client, f"r{number}", 50)
    follower.expect(client)
    assert len(follower.mirror.blocks) > 30
    assert client.call("reset_prefix_cache", False) == (None, True)
    generate(client, "again", 20)
    follower.expect(client)
    assert client.call("sleep", 1) == (None, None)
    follower.read_until(lambda: not follower.mirror.blocks, "the end of all blocks")
    follower.read_until(lambda: follower.stats is not None and follower.stats.engines[0].is_sleeping, "sleep")
    assert client.call("wake_up") == (None, None)
    generate(client, "awake", 20)
    follower.expect(client)
    assert (follower.num_snapshots, follower.subscriber.num_losses) == (1, 0)


def test_late_followers_agree_and_recording_ends_with_the_last(start_engine, follow: Follow) -> None:
    engine, client = start(start_engine)
    first = Follower(follow(engine))
    first.read_until(lambda: first.mirror.seq is not None, "a snapshot")
    generate(client, "a", 20)
    second = Follower(follow(engine))
    second.read_until(lambda: second.mirror.seq is not None, "a snapshot")
    generate(client, "b", 20)
    for follower in (first, second):
        follower.expect(client)
    assert first.mirror.blocks == second.mirror.blocks
    assert first.num_snapshots == 1
    before = snapshot(client).seq
    for follower in (first, second):
        follower.subscriber.close()
    generate_until_nothing_is_recorded(client, before)
    third = Follower(follow(engine))
    third.read_until(lambda: third.mirror.seq is not None, "a snapshot")
    third.expect(client)


def generate_until_nothing_is_recorded(client: RawClient, seq: int) -> None:
    end = time.monotonic() + DEADLINE
    while True:
        generate(client, f"quiet-{time.monotonic_ns()}", 20)
        if (now := snapshot(client).seq) == seq:
            return
        seq = now
        assert time.monotonic() < end, "events are recorded for nobody"


def test_one_who_subscribes_before_the_engine_is_ready_gets_everything(start_engine, follow: Follow) -> None:
    engine = start_engine(KNOBS | {"load_seconds": 0.3}, cache=CacheConfig(num_gpu_blocks_override=40))
    follower = Follower(follow(engine))
    engine.wait_ready()
    client = engine.client().attach()
    generate(client, "a", 40)
    follower.read_until(lambda: follower.mirror.seq is not None, "a snapshot")
    follower.expect(client)


def test_one_who_does_not_keep_up_slows_nobody_sees_the_gap_and_goes_on_from_a_snapshot(
    start_engine, follow: Follow
) -> None:
    engine, client = start(start_engine, num_blocks=3000)
    follower = Follower(follow(engine))
    follower.read_until(lambda: follower.mirror.seq is not None, "a snapshot")
    # With blocks of 4 tokens, a batch of events every 4 steps.
    first = snapshot(client).seq
    names = 0
    while snapshot(client).seq < first + 10 * RECEIVE_HWM:
        generate(client, f"long-{names}", 10, max_tokens=3000)
        assert len(client.tokens(f"long-{names}")) == 3000
        names += 1
    # Now it reads again. Nothing more happens that could tell it of its loss.
    follower.read_until(lambda: follower.num_snapshots > 1, "another snapshot")
    assert follower.subscriber.num_losses == 1
    follower.expect(client)
    generate(client, "last", 30)
    follower.expect(client)
    assert follower.num_snapshots == 2
