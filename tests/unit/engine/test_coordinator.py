"""The coordinator publishes the freshest statistics: at most every 100 ms, and at once when an engine goes idle."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.engine.host.coordinator import PUBLISH_INTERVAL, DPCoordinator, DPCoordinatorProc
from nbengine.errors import WireError
from nbengine.ipc.control_messages import WantEvents
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import EngineStats, SchedulerStats
from tests.support.thorough import amount


def report(step: int, running: int, rank: int = 0, wave: int = 0, waiting: int = 0) -> EngineCoreOutputs:
    stats = SchedulerStats(
        engine_index=rank,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        step_counter=step,
        current_wave=wave,
    )
    return EngineCoreOutputs(engine_index=rank, scheduler_stats=stats)


def test_the_first_report_is_due_at_once_and_later_ones_wait_for_the_interval() -> None:
    state = DPCoordinator(1)
    assert state.due is None
    state.observe(report(1, 1), 5.0)
    assert state.due == 5.0
    state.publish(5.0, 0.0)
    assert state.due is None
    state.observe(report(2, 1), 5.01)
    state.observe(report(3, 1), 5.02)
    assert state.due == 5.0 + PUBLISH_INTERVAL
    assert state.publish(5.1, 0.0).engines[0].step_counter == 3


def test_going_idle_is_due_at_once() -> None:
    state = DPCoordinator(1)
    state.observe(report(1, 1), 5.0)
    state.publish(5.0, 0.0)
    state.observe(report(2, 0), 5.01)
    assert state.due == 5.01
    snapshot = state.publish(5.01, 17.0)
    assert (snapshot.engines_running, snapshot.timestamp) == (False, 17.0)


def test_a_waiting_request_keeps_an_engine_from_being_idle() -> None:
    state = DPCoordinator(1)
    state.observe(report(1, 0, waiting=1), 0.0)
    assert state.snapshot(0.0).engines_running


def test_stale_reports_are_dropped_rank_by_rank() -> None:
    state = DPCoordinator(2)
    state.observe(report(9, 5, rank=0), 0.0)
    state.observe(report(3, 1, rank=0), 0.0)
    state.observe(report(4, 2, rank=1), 0.0)
    state.observe(report(1, 7, rank=0, wave=1), 0.0)
    state.observe(report(10, 1, rank=0, wave=0), 0.0)
    snapshot = state.snapshot(0.0)
    assert [e.num_running_reqs for e in snapshot.engines] == [7, 2]


def test_what_requests_have_taken_stays_until_it_changes_or_the_engine_core_is_another() -> None:
    state = DPCoordinator(1)
    told = RequestStats(finished=[3, 0, 0, 0])
    first = report(1, 1)
    first.scheduler_stats.requests = told
    state.observe(first, 0.0)
    state.observe(report(2, 1), 0.0)
    assert state.snapshot(0.0).engines[0].requests == told
    newer = report(1, 1)
    newer.incarnation = 1
    state.observe(newer, 0.0)
    assert state.snapshot(0.0).engines[0].requests is None


def test_news_of_the_same_step_counts() -> None:
    state = DPCoordinator(1)
    state.observe(report(4, 1), 0.0)
    state.observe(report(4, 0), 0.0)
    assert state.snapshot(0.0).engines[0].num_running_reqs == 0


def test_outputs_without_statistics_change_nothing_and_unknown_engines_are_refused() -> None:
    state = DPCoordinator(1)
    state.observe(EngineCoreOutputs(), 0.0)
    assert state.due is None
    with pytest.raises(WireError, match="engine 1, there are 1"):
        state.observe(report(1, 1, rank=1), 0.0)


@given(st.lists(st.tuples(st.floats(0, 0.05), st.integers(0, 1)), min_size=1, max_size=60))
@settings(max_examples=amount(20, thorough=2000), deadline=None)
def test_whatever_happens_the_last_word_is_published_and_busy_engines_do_not_flood(history) -> None:
    state = DPCoordinator(1)
    now, published, busy = 0.0, [], []
    for step, (pause, running) in enumerate(history):
        now += pause
        state.observe(report(step, running), now)
        while state.due is not None and state.due <= now:
            published.append(state.publish(now, now))
            if published[-1].engines_running:
                busy.append(now)
    if state.due is not None:
        published.append(state.publish(state.due, now))
    assert published[-1].engines[0].step_counter == len(history) - 1
    assert all(later - earlier >= PUBLISH_INTERVAL * 0.999 for earlier, later in itertools.pairwise(busy))


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_a_subscriber_gets_the_state_at_once_and_garbage_is_dropped(context, tmp_path: Path, caplog) -> None:
    front, back = f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back"
    coordinator = DPCoordinatorProc(context, 1, front, back, f"ipc://{tmp_path}/publish")
    engine, subscriber = context.socket(zmq.PUSH), context.socket(zmq.SUB)
    try:
        engine.connect(back)
        for frame in (
            b"garbage",
            *MsgpackEncoder().encode(report(7, 1)),
            *MsgpackEncoder().encode(report(1, 1, rank=5)),
        ):
            engine.send(frame)
        while coordinator.state.due is None:
            assert coordinator.output_back.poll(60_000)
            coordinator.process_input_socket(coordinator.output_back, 0.0)
        coordinator.publish_if_due(0.0)
        subscriber.connect(front)
        subscriber.subscribe(b"")
        assert coordinator.publish_front.poll(60_000)
        coordinator.process_input_socket(coordinator.publish_front, 0.0)
        assert subscriber.poll(60_000)
        topic, *frames = subscriber.recv_multipart()
        assert topic == b"stats"
        stats = MsgpackDecoder(EngineStats).decode(frames)
        assert stats.engines[0].step_counter == 7
        assert "dropped a message to the coordinator" in caplog.text
    finally:
        for socket in (engine, subscriber):
            socket.close(linger=0)
        coordinator.close()


KV, TRACE = WantEvents("kv", True), WantEvents("trace", True)


def read_subscriptions(coordinator: DPCoordinatorProc, *wishes: WantEvents) -> list[WantEvents]:
    """Read what the engines are told until it is `wishes`, one a topic."""
    found: list[WantEvents] = []
    while found != list(wishes):
        left_ms = 1000 * (coordinator.deadline - time.monotonic())
        patience = 5000 if left_ms == math.inf else max(0, math.ceil(left_ms))
        assert coordinator.publish_front.poll(patience) or patience < 5000, f"{found} instead of {wishes}"
        coordinator.process_input_socket(coordinator.publish_front, 0.0)
        found += coordinator.take_wishes(time.monotonic())
        found.sort(key=lambda wish: wish.topic)
    return found


def test_events_are_wanted_while_there_are_subscribers_and_passed_on_as_they_come(
    context: zmq.Context, tmp_path: Path
) -> None:
    front, back = f"ipc://{tmp_path}/front", f"ipc://{tmp_path}/back"
    coordinator = DPCoordinatorProc(context, 1, front, back, f"ipc://{tmp_path}/publish")
    engine, stats_only, first, second = (
        context.socket(kind) for kind in (zmq.PUSH, zmq.SUB, zmq.SUB, zmq.SUB)
    )
    try:
        for subscriber in (stats_only, first, second):
            subscriber.connect(front)
        engine.connect(back)
        stats_only.subscribe(b"stats")
        first.subscribe(b"kv")
        read_subscriptions(coordinator, KV)
        assert coordinator.standing_wishes == [KV]
        # Each newcomer needs a snapshot; a topic may be given by its beginning.
        second.subscribe(b"")
        read_subscriptions(coordinator, KV, TRACE)
        assert coordinator.standing_wishes == [KV, TRACE]
        engine.send_multipart([b"kv", b"batch"])
        assert coordinator.output_back.poll(60_000)
        coordinator.process_input_socket(coordinator.output_back, 0.0)
        assert first.poll(60_000)
        assert first.recv_multipart() == [b"kv", b"batch"]
        engine.send_multipart([b"trace", b"batch"])
        assert coordinator.output_back.poll(60_000)
        coordinator.process_input_socket(coordinator.output_back, 0.0)
        assert second.poll(60_000)
        assert [second.recv_multipart()[0] for _ in range(3)] == [b"stats", b"kv", b"trace"]
        second.unsubscribe(b"")
        read_subscriptions(coordinator, WantEvents("trace", False))
        assert coordinator.standing_wishes == [KV]
        assert not first.poll(0), "it has not asked for the trace"
        first.close(linger=0)
        read_subscriptions(coordinator, WantEvents("kv", False))
        assert coordinator.standing_wishes == []
        assert stats_only.poll(60_000)
        while stats_only.poll(0):
            assert stats_only.recv_multipart()[0] == b"stats"
    finally:
        for socket in (engine, stats_only, first, second):
            socket.close(linger=0)
        coordinator.close()
