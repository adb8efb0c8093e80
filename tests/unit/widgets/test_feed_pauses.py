"""Nobody looks for a while: what is shown afterwards is how things stand then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import RequestAdded, RequestFinished
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.dashboard import widget as dashboard_module
from nbengine.widgets.dashboard.widget import Dashboard
from nbengine.widgets.following.feed import EngineFeed, Source
from tests.unit.widgets.publishing import DEADLINE, Deaf, Follow, Listener, Publisher, wait_until


def begin(publisher: Publisher) -> None:
    publisher.publish(RequestAdded(0, "r0", 0, publisher.time, 4, 10, [1]), num_running_reqs=3)


def end(publisher: Publisher) -> None:
    publisher.publish(RequestFinished(0, publisher.time, "stop"), num_running_reqs=0)


@contextmanager
def late(publisher: Publisher) -> Iterator[None]:
    """The engine answers only after more than a second."""
    publisher._lock.acquire()
    timer = threading.Timer(1.2, publisher._lock.release)
    timer.start()
    yield
    timer.join()


def is_running(listener: Listener) -> None:
    listener.wait_for(lambda state: state.state == "running")


def is_left_alone(publisher: Publisher, times: int = 1) -> None:
    wait_until(lambda: publisher.topics.count(b"\x00trace") == times)


def test_who_comes_after_a_pause_waits_for_the_engine(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    feed = follow(listener)
    begin(publisher)
    is_running(listener)
    listener.follows = False
    is_left_alone(publisher)
    end(publisher)
    follow(Listener())
    assert feed.wait_until_known(DEADLINE)
    with feed.state() as state:
        assert (state.state, state.mirrors[0].num_snapshots) == ("idle", 2)


def test_to_wait_is_to_follow(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    listener.follows = False
    feed = follow(listener)
    assert feed.wait_until_known(DEADLINE)
    is_left_alone(publisher)
    begin(publisher)
    assert feed.wait_until_known(DEADLINE)
    with feed.state() as state:
        assert state.state == "running"
    is_left_alone(publisher, 2)


def test_of_a_pause_no_steps_and_waves_are_known(follow: Follow, publisher: Publisher) -> None:
    listener = Listener()
    feed = follow(listener)
    assert feed.wait_until_known(DEADLINE)
    publisher.publish_stats(SchedulerStats(0, 1, step_counter=10))
    listener.wait_for(lambda state: state.waves.total(0).steps == 10)
    listener.follows = False
    is_left_alone(publisher)
    publisher.publish_stats(SchedulerStats(0, 1, step_counter=5010))
    listener.follows = True
    assert feed.wait_until_known(DEADLINE)
    publisher.publish_stats(SchedulerStats(0, 1, step_counter=5020))
    state = listener.wait_for(lambda state: state.waves.total(0).steps > 10)
    assert state.waves.total(0).steps == 20


def test_an_engine_that_does_not_answer_is_not_shown_as_it_was(
    info: ConnectionInfo, publisher: Publisher
) -> None:
    listener, deaf = Listener(), Deaf()
    told: list[int] = []

    @contextmanager
    def not_heard() -> Iterator[Source]:
        told.append(len(listener.states))
        yield deaf

    def subscribe(info: ConnectionInfo) -> AbstractContextManager[Source]:
        return not_heard() if publisher.topics else StatsSubscriber(info, trace=True)

    feed = EngineFeed.listen(info, listener, subscribe=subscribe)
    begin(publisher)
    is_running(listener)
    listener.follows = False
    is_left_alone(publisher)
    listener.follows = True
    feed.look_again()
    wait_until(lambda: deaf.num_polls > 3)
    assert told == [len(listener.states)]
    assert not feed.wait_until_known(0.01)
    feed.leave(listener)
    feed.join(DEADLINE)


def test_a_dashboard_that_nobody_looks_at_is_closed_with_how_things_stand(
    info: ConnectionInfo, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "SILENCE", 0.0)
    dashboard = Dashboard(info)
    feed = EngineFeed._feeds[info.run_dir]
    begin(publisher)
    assert feed.wait_until_known(DEADLINE)
    dashboard._handle_custom_msg({"kind": "alive"}, [])
    is_left_alone(publisher)
    assert "running" in dashboard.static()["text/plain"]
    is_left_alone(publisher, 2)
    end(publisher)
    with late(publisher):
        dashboard.close()
    assert "· idle" in dashboard.static()["text/plain"]
    feed.join(DEADLINE)
    assert not feed.is_running
