"""The feed, from the coordinator's socket to its listeners."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.ipc.control_messages import EngineReady
from nbengine.metrics.stats import SchedulerStats, WorkerStats
from nbengine.metrics.trace import RequestAdded, RequestFinished, StepDone, StepPlanned
from nbengine.runtime.connection import ConnectionInfo, write_connection
from nbengine.widgets.following import feed as feed_module
from nbengine.widgets.following import rates as rates_module
from nbengine.widgets.following.feed import EngineFeed
from nbengine.widgets.following.ownership import WAITING, Owner
from tests.unit.widgets.publishing import DEADLINE, Follow, Listener, Publisher, wait_until


class FakeClient:
    """A client of the engine in this process."""

    client_index = 3
    death: NBEngineError | None = None

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort_soon(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def go_on_soon(self) -> None:
        raise NotImplementedError

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def added(number: int, name: str = "", client: int = 3, moment: float = 1000.0) -> RequestAdded:
    return RequestAdded(number, name or f"r{number}", client, moment, 6, 100, [72, 105])


def knows(rank: int = 0) -> Callable[[object], bool]:
    # The mirrors are live: a state from before may have them.
    return lambda state: (
        bool(state.stats.engines) and rank in state.mirrors and state.mirrors[rank].seq is not None
    )


def test_a_listener_hears_what_is_published(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    feed = follow(listener)
    assert feed.wait_until_known(DEADLINE)
    state = listener.wait_for(knows())
    assert (state.state, state.label.name, state.label.topology) == ("idle", "dense", "1 engine core")
    assert state.rates.time_to_first_token is None
    assert state.rates.memory_bytes is None
    publisher.publish(
        added(0),
        StepPlanned(0, 1000.1, [0], [6], [0], [0], [(0, [1, 2])]),
        num_running_reqs=1,
        num_free_blocks=6,
    )
    state = listener.wait_for(lambda state: state.state == "running")
    assert state.stats.engines[0].num_free_blocks == 6
    assert listener.steps == [[0]]
    publisher.publish(RequestFinished(0, 1000.3, "abort"), num_running_reqs=0, num_free_blocks=8)
    state = listener.wait_for(lambda state: state.state == "idle")
    assert state.time == pytest.approx(publisher.time)


def test_all_listeners_of_an_engine_share_a_thread_and_a_subscription(
    follow: Follow, publisher: Publisher
) -> None:
    listeners = [Listener() for _ in range(5)]
    feeds = [follow(listener) for listener in listeners]
    assert len(set(feeds)) == 1
    for listener in listeners:
        listener.wait_for(knows())
    assert publisher.topics.count(b"\x01trace") == 1
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("nbengine-feed-dense") == 1
    for listener in listeners[:4]:
        feeds[0].leave(listener)
    publisher.publish(added(0), num_waiting_reqs=1)
    listeners[4].wait_for(lambda state: state.state == "running")
    assert all(state.state == "idle" for state in listeners[0].states)
    feeds[0].leave(listeners[4])
    feeds[0].join(DEADLINE)
    assert not feeds[0].is_running
    again = Listener()
    assert follow(again) is not feeds[0]
    again.wait_for(knows())


def test_states_come_five_times_a_second_at_most(
    follow: Follow, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "PUBLISH_INTERVAL", 0.2)
    listener = Listener()
    follow(listener)
    listener.wait_for(knows())
    began, count = time.monotonic(), len(listener.states)
    for number in itertools.count():
        publisher.publish(added(number))
        if len(listener.states) >= count + 6:
            break
        time.sleep(0.002)
    # The first of them may have been due already, long ago on a busy machine.
    assert time.monotonic() - began >= 3 * 0.2


def test_a_feed_that_lets_messages_gather_goes_on_at_once_when_it_is_asked_to(
    follow: Follow, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    feed = follow(listener)
    assert feed.wait_until_known(DEADLINE)
    monkeypatch.setattr(feed_module, "PUBLISH_INTERVAL", 3600.0)
    for number in range(50):
        publisher.publish(added(number), num_waiting_reqs=number + 1)

    def has_all() -> bool:
        feed.look_again()
        with feed.state() as state:
            return state.stats.engines[0].num_waiting_reqs == 50

    wait_until(has_all)
    feed.leave(listener)
    # With such an interval it may wait as long for the next message.
    publisher.publish(added(50))
    feed.join(DEADLINE)
    assert not feed.is_running


def test_while_nobody_follows_the_engine_is_left_alone(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    feed = follow(listener)
    listener.wait_for(knows())
    listener.follows = False
    wait_until(lambda: publisher.topics.count(b"\x00trace") == 1)
    assert feed.is_running
    publisher.publish(added(0), num_waiting_reqs=1)
    listener.follows = True
    feed.look_again()
    state = listener.wait_for(lambda state: state.stats.engines[0].num_waiting_reqs == 1)
    assert state.mirrors[0].num_snapshots == 2


def test_the_end_of_the_host_is_told_with_its_log(
    follow: Follow, info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed_module, "ALIVE_INTERVAL", 0.05)
    listener, resting = Listener(), Listener()
    resting.follows = False
    feed = follow(listener)
    follow(resting)
    listener.wait_for(knows())
    info.host_started -= 1
    state = listener.wait_for(lambda state: state.state == "ended")
    assert state.note == f"its host, process {info.host_pid}, is gone; the log is /logs/dense.log"
    assert state.rates.tokens_out_per_second is None
    resting.wait_for(lambda state: state.state == "ended")
    feed.join(DEADLINE)
    count = len(listener.states)
    with feed.state() as last:
        assert (last.state, last.note) == ("ended", state.note)
    assert len(listener.states) == count


def test_what_killed_the_engine_is_told_where_a_client_knows_it(follow: Follow) -> None:
    listener, client = Listener(), FakeClient()
    follow(listener, Owner(client))
    listener.wait_for(knows())
    client.death = EngineDeadError("out of memory", "a log\nof lines")
    assert listener.wait_for(lambda state: state.state == "ended").note == "out of memory"


def test_an_end_that_is_announced_is_told_before_anything_else_happens(
    follow: Follow, info: ConnectionInfo
) -> None:
    listener = Listener()
    feed = follow(listener)
    listener.wait_for(knows())
    EngineFeed.announce_end(info, "the engine was stopped")
    assert (listener.states[-1].state, listener.states[-1].note) == ("ended", "the engine was stopped")
    feed.join(DEADLINE)
    assert not feed.is_running
    EngineFeed.announce_end(info, "again")
    assert listener.states[-1].note == "the engine was stopped"


def test_a_listener_that_fails_is_left_alone_and_the_others_go_on(
    follow: Follow, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    broken, listener = Listener(), Listener()
    broken.fails = True
    follow(broken)
    follow(listener)
    listener.wait_for(knows())
    publisher.publish(added(0), num_waiting_reqs=1)
    listener.wait_for(lambda state: state.state == "running")
    assert caplog.text.count("has failed, and is left alone") == 1


def test_lost_batches_are_told_and_the_state_is_right_again(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    follow(listener)
    listener.wait_for(knows())
    publisher.publish(added(0), skip=3, num_waiting_reqs=2)
    state = listener.wait_for(lambda state: bool(state.note))
    assert state.note == "this notebook did not keep up, and some steps are missing"
    state = listener.wait_for(lambda state: state.stats.engines[0].num_waiting_reqs == 2)
    assert state.mirrors[0].num_snapshots == 2


def test_engine_cores_come_restart_and_go(
    follow: Follow, publisher: Publisher, info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener()
    follow(listener)
    listener.wait_for(knows())
    parallel = replace(info.config.parallel, data_parallel_size=2)
    config = replace(info.config, parallel=parallel)
    ready = EngineReady(0, 8, 4, 64, 1, 1, "cpu", "float32", ["generate"], 1)
    newer = ConnectionInfo(
        **{name: getattr(info, name) for name in info.__struct_fields__ if name not in ("config", "ready")},
        config=config,
        ready=[ready],
    )
    write_connection(newer)
    publisher.publish_stats(*(SchedulerStats(rank, num_blocks=8) for rank in range(2)))
    state = listener.wait_for(lambda state: state.label.topology == "DP 2")
    assert (state.label.device, state.label.dtype) == ("cpu", "float32")
    assert [engine.engine_index for engine in state.stats.engines] == [0, 1]
    publisher.publish_stats(SchedulerStats(0), SchedulerStats(1, num_blocks=8))
    state = listener.wait_for(lambda state: state.stats.engines[0] == SchedulerStats(0))
    publisher.publish_stats(SchedulerStats(0, num_blocks=8))
    state = listener.wait_for(lambda state: len(state.stats.engines) == 1)
    assert list(state.mirrors) == [0]


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({"num_running_reqs": 1}, "running"),
        ({"num_waiting_reqs": 1}, "running"),
        ({"num_waiting_reqs": 1, "is_paused": True}, "paused"),
        ({"sleep_level": 1, "is_paused": True}, "asleep"),
        ({}, "idle"),
    ],
)
def test_the_state_has_a_name(
    follow: Follow, publisher: Publisher, figures: dict[str, object], word: str
) -> None:
    listener = Listener()
    follow(listener)
    listener.wait_for(knows())
    publisher.publish_stats(SchedulerStats(0, num_blocks=8, num_cached_blocks=1, **figures))
    # Blocks and requests are the trace's as long as it is not far behind.
    publisher.publish(num_cached_blocks=1)
    state = listener.wait_for(lambda state: state.stats.engines[0].num_cached_blocks == 1)
    assert state.state == word


def test_flags_are_the_newest_and_blocks_those_of_the_mirror(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    follow(listener)
    listener.wait_for(knows())
    workers = [WorkerStats(0, 1 << 20), WorkerStats(1, 1 << 20)]
    later = SchedulerStats(
        0, num_blocks=8, num_free_blocks=1, step_counter=9, is_paused=True, workers=workers
    )
    publisher.publish_stats(later)
    state = listener.wait_for(lambda state: state.state == "paused")
    (engine,) = state.stats.engines
    assert (engine.num_free_blocks, engine.step_counter) == (8, 0)
    assert state.rates.memory_bytes == 2 << 20
    publisher.time += 1.0
    publisher.publish_stats(later)
    state = listener.wait_for(lambda state: state.stats.engines[0].step_counter == 9)
    assert state.stats.engines[0].num_free_blocks == 1


def test_own_requests_are_those_of_the_process_and_of_its_notebook(
    follow: Follow, publisher: Publisher
) -> None:
    listener, client = Listener(), FakeClient()
    foreground = {"chosen": True, "p": True, "kept": False}
    source = foreground.copy
    WAITING.add(source)
    try:
        follow(listener, Owner(client))
        listener.wait_for(knows())
        names = ["chosen", "0_p", "x_p", "1_kept", "direct"]
        requests = [added(number, name) for number, name in enumerate(names)]
        publisher.publish(*requests, added(9, "foreign", client=4), num_waiting_reqs=6)
        state = listener.wait_for(lambda state: "direct" in state.own_requests)
    finally:
        WAITING.remove(source)
    own = {name: own for name, own in state.own_requests.items() if name not in foreground}
    assert own == {"0_p": True, "x_p": False, "1_kept": False, "direct": False}
    assert state.own_requests["chosen"] is True


def test_a_feed_keeps_no_client_alive() -> None:
    client = FakeClient()
    owner = Owner(client)
    del client
    assert owner.cause_of_death() is None
    assert owner.decode([72]) is None
    assert not owner.owns(added(0))
    with pytest.raises(NBEngineError, match="the client of request r0 is gone"):
        owner.abort(added(0))


def test_rates_fall_to_nothing_when_the_engine_rests(
    follow: Follow, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates_module, "WINDOW", 1.0)
    clock = [time.time()]
    stopped = SimpleNamespace(time=lambda: clock[0], monotonic=time.monotonic)
    monkeypatch.setattr(feed_module, "time", stopped)
    listener = Listener()
    publisher.time = clock[0] - 10
    follow(listener)
    listener.wait_for(knows())
    publisher.time = moment = clock[0]
    publisher.publish(
        added(0, moment=moment - 0.5),
        StepPlanned(0, moment - 0.25, [0], [6], [0], [0], [(0, [1, 2])]),
        StepDone(0, moment - 0.125),
        num_running_reqs=1,
    )
    state = listener.wait_for(lambda state: bool(state.rates.tokens_out_per_second))
    assert state.rates.tokens_in_per_second == pytest.approx(6)
    assert state.rates.tokens_out_per_second == pytest.approx(1)
    assert state.rates.time_to_first_token == pytest.approx(0.375, abs=1e-6)
    clock[0] += 2.0
    listener.wait_for(lambda state: state.rates.tokens_out_per_second == 0)
