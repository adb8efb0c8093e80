"""A follower of an engine core's trace is exact, or knows that it is not; the engine never waits for it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from process_support.engine_under_test import ASYNC_FAKE_EXECUTOR, SUPPORT_PATH, EngineUnderTest
from process_support.raw_client import DEADLINE, RawClient
from process_support.trace_follower import TraceFollower
from stopping import stop

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.config import CacheConfig, ParallelConfig, SchedulerConfig
from nbengine.engine.core.core_proc import TRACE_INTERVAL
from nbengine.ipc.messages import TRACE_TOPIC
from nbengine.metrics.stats import SchedulerStats

Follow = Callable[[EngineUnderTest], TraceFollower]
FOLLOW = """
import sys
from pathlib import Path
from nbengine.runtime.connection import read_connection
from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.metrics.trace import TraceSnapshot
with StatsSubscriber(read_connection(Path(sys.argv[1])), trace=True) as subscriber:
    while True:
        if isinstance(subscriber.poll(), TraceSnapshot):
            print("begun", flush=True)
"""


@pytest.fixture
def follow(no_leftovers: None) -> Iterator[Follow]:
    """Follow an engine's trace."""
    subscribers: list[StatsSubscriber] = []

    def start(engine: EngineUnderTest) -> TraceFollower:
        subscribers.append(StatsSubscriber(engine.info, trace=True))
        return TraceFollower(subscribers[-1])

    yield start
    for subscriber in subscribers:
        subscriber.close()


def start(start_engine, **knobs: object) -> tuple[EngineUnderTest, RawClient]:
    """An engine with few blocks and a small budget, two steps of which are in flight."""
    engine = start_engine(
        {"vocab_size": 100_000, **knobs},
        cache=CacheConfig(num_gpu_blocks_override=40, block_size=4),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=24),
        parallel=ParallelConfig(distributed_executor_backend=ASYNC_FAKE_EXECUTOR),
    )
    engine.wait_ready()
    return engine, engine.client().attach()


def stats_of(client: RawClient) -> SchedulerStats:
    """Return what a trace has of the engine core's state."""
    failure, answer = client.call("stats")
    assert failure is None
    stats = msgspec.convert(answer, SchedulerStats)
    assert stats.requests is not None
    return msgspec.structs.replace(stats, requests=None)


def expect_same(client: RawClient, follower: TraceFollower) -> SchedulerStats:
    """Check that the mirror comes to the very statistics that a call is answered with, while nothing goes
    on."""
    truth = stats_of(client)
    mirror = follower.mirrors[0]
    follower.read_until(lambda: mirror.stats == truth, f"{truth} in place of {mirror.stats}")
    return truth


def same_state(one: TraceMirror, other: TraceMirror) -> None:
    assert list(one.requests) == list(other.requests)
    for number, view in one.requests.items():
        twin = other.requests[number]
        assert (view.added.request_id, view.state) == (twin.added.request_id, twin.state)
        assert abs(view.added.time - twin.added.time) < 0.01
        for name in ("num_computed_tokens", "num_output_tokens", "num_cached_tokens", "block_ids"):
            assert getattr(view, name) == getattr(twin, name)
    assert (one.blocks.ref_counts == other.blocks.ref_counts).all()
    assert (one.blocks.cached == other.blocks.cached).all()
    assert (one.blocks.token_ids == other.blocks.token_ids).all()


def lose_a_batch(follower: TraceFollower) -> None:
    """Take a batch from under a subscriber."""
    end = time.monotonic() + DEADLINE
    while True:
        assert time.monotonic() < end, "no batch came"
        socket = follower.subscriber._socket
        if socket.poll(100) and socket.recv_multipart()[0] == TRACE_TOPIC:
            return


def test_a_follower_agrees_with_the_engine_at_every_step_that_both_speak_of(
    start_engine, follow: Follow
) -> None:
    # Slow enough that requests still run and wait at each pause, though this process may be late to ask for it.
    engine, client = start(start_engine, step_seconds=0.02)
    first, second = follow(engine), None
    mirror = first.begin()
    assert (mirror.max_num_batched_tokens, mirror.max_num_seqs, mirror.blocks.block_size) == (24, 8, 4)
    prompt = list(range(1000, 1030))
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        client.add(name, prompt if number % 2 else [7 * number, *prompt], max_tokens=40, ignore_eos=True)
    client.abort("r3", "r11")
    for pause in range(3):
        client.read_until(lambda name=f"r{pause}": len(client.tokens(name)) >= 8)
        assert client.call("pause_generation", "keep", False) == (None, None)
        truth = expect_same(client, first)
        assert truth.num_running_reqs
        assert truth.num_waiting_reqs
        if second is None:
            second = follow(engine)
            same_state(mirror, second.begin())
        assert client.call("resume_generation") == (None, None)
    lose_a_batch(second)
    rest = [name for name in names if name not in ("r3", "r11")]
    client.wait_finished(*rest)
    truth = expect_same(client, first)
    assert truth.num_free_blocks == 40
    assert truth.num_preemptions == sum(view.num_preemptions for view in mirror.finished.values()) > 0
    expect_same(client, second)
    assert (first.subscriber.num_losses, mirror.num_snapshots) == (0, 1)
    assert (second.subscriber.num_losses, second.mirrors[0].num_snapshots) == (1, 2)
    ended = {view.added.request_id: view for view in mirror.finished.values()}
    assert {name: ended[name].num_output_tokens for name in rest} == dict.fromkeys(rest, 40)
    assert {name for name, view in ended.items() if view.finish_reason == "abort"} == {"r3", "r11"}
    assert {ended[name].finish_reason for name in rest} == {"length"}
    assert max(view.num_cached_tokens for view in ended.values()) >= 28
    assert max(step.num_prefill_tokens for step in mirror.steps) == 24
    assert sum(step.num_sampled for step in mirror.steps) == sum(v.num_output_tokens for v in ended.values())
    assert any(step.preempted for step in mirror.steps)
    assert any(step.resumed for step in mirror.steps)
    assert client.call("reset_prefix_cache", False) == (None, True)
    assert expect_same(client, first).num_cached_blocks == 0
    client.add("again", prompt)
    client.wait_finished("again")
    assert client.call("sleep", 1) == (None, None)
    assert client.call("wake_up") == (None, None)
    assert expect_same(client, first).num_cached_blocks == 0


def test_followers_that_freeze_or_die_hold_up_nobody_and_nothing_is_recorded_without_any(
    start_engine, follow: Follow
) -> None:
    engine, client = start(start_engine)
    command = [sys.executable, "-c", FOLLOW, f"{engine.run_dir}/engine.json"]
    others = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": SUPPORT_PATH})
        for _ in range(2)
    ]
    try:
        for other in others:
            assert other.stdout is not None
            assert other.stdout.readline() == "begun\n"
        frozen, killed = others
        stop(frozen.pid)
        follower = follow(engine)
        follower.begin()
        for number in range(300):
            if number == 150:
                killed.kill()
            client.add(f"r{number}", [number, 1, 2, 3, 4, 5])
            client.wait_finished(f"r{number}")
        expect_same(client, follower)
        assert follower.subscriber.num_losses == 0
        assert [view.added.request_id for view in follower.mirrors[0].finished.values()] == [
            f"r{number}" for number in range(300)
        ]
    finally:
        for other in others:
            other.kill()
            other.wait()
            assert other.stdout is not None
            other.stdout.close()
    follower.subscriber.close()
    expect_nothing_recorded(engine, client, follow)


def expect_nothing_recorded(engine: EngineUnderTest, client: RawClient, follow: Follow) -> None:
    """Check that between two followers nobody counts batches, except one that says after the first one's snapshot
    that the engine core is at rest, and one for what nobody has heard of."""
    end = time.monotonic() + DEADLINE
    last = None
    while True:
        follower = follow(engine)
        seq = follower.begin().seq
        follower.subscriber.close()
        if last is not None and seq <= last + 2:
            return
        assert time.monotonic() < end, f"batches are made for nobody: from {last} to {seq}"
        last = seq
        # The host hears of this new subscriber after the follower's end, however busy the machine is.
        newcomer = client.subscribe()
        client.read_stats(newcomer)
        newcomer.close()
        # If they were recorded, they would fill more batches than two.
        number, until = 0, time.monotonic() + 10 * TRACE_INTERVAL
        while number < 20 or time.monotonic() < until:
            name = f"quiet-{time.monotonic_ns()}"
            client.add(name, [1, 2, 3])
            client.wait_finished(name)
            number += 1
