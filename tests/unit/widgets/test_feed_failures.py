"""Nonsense and failures leave nobody with a feed that does nothing."""

from __future__ import annotations

import pytest

from nbengine.metrics.trace import (
    BlocksUncached,
    RequestAdded,
    RequestFinished,
    StepContinued,
    StepPlanned,
    TraceEvent,
)
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.following import feed as feed_module
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed
from nbengine.widgets.following.feed_state import FeedState
from nbengine.widgets.following.ownership import WAITING
from tests.unit.widgets.publishing import DEADLINE, Follow, Listener, Publisher, wait_until


@pytest.mark.parametrize(
    "event",
    [
        StepContinued(5, 1000.0, []),
        RequestFinished(77, 1000.0, "stop"),
        BlocksUncached([1 << 40]),
        StepPlanned(0, 1000.0, [], [1], [], [], []),
    ],
    ids=lambda event: type(event).__name__,
)
def test_nonsense_costs_a_new_subscription_and_no_more(
    follow: Follow,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    event: TraceEvent,
) -> None:
    monkeypatch.setattr(feed_module, "ALIVE_INTERVAL", 0.05)
    listener = Listener()
    feed = follow(listener)
    assert feed.wait_until_known(DEADLINE)
    publisher.publish(event)
    wait_until(lambda: publisher.topics.count(b"\x01trace") == 2)
    assert "makes no sense" in caplog.text
    assert feed.wait_until_known(DEADLINE)
    publisher.publish(RequestAdded(0, "r0", 3, 1000.0, 6, 100, [72, 105]), num_waiting_reqs=1)
    state = listener.wait_for(lambda state: state.state == "running" and 0 in state.mirrors)
    assert list(state.mirrors[0].requests) == [0]


def test_a_feed_that_fails_says_so_and_the_next_one_is_another(
    follow: Follow, info: ConnectionInfo, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> dict[str, bool]:
        raise RuntimeError("nobody knows what is waited for")

    listener = Listener()
    feed = follow(listener)
    assert feed.wait_until_known(DEADLINE)
    WAITING.add(fail)
    try:
        state = listener.wait_for(lambda state: state.state == "ended")
        feed.join(DEADLINE)
    finally:
        WAITING.remove(fail)
    reason = "RuntimeError('nobody knows what is waited for')"
    assert state.note == f"this notebook cannot follow it any more: {reason}"
    assert "Traceback" in caplog.text
    assert not feed.is_running
    again = Listener()
    assert follow(again) is not feed
    again.wait_for(lambda state: state.state == "idle")


def test_a_feed_that_cannot_even_say_so_is_gone(
    follow: Follow, info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = follow(Listener())
    assert feed.wait_until_known(DEADLINE)

    def fail(state: FeedState, now: float) -> DashboardState:
        raise RuntimeError("there is no state")

    with feed.state():
        monkeypatch.setattr(FeedState, "build", fail)
        with pytest.raises(RuntimeError, match="there is no state"):
            EngineFeed.announce_end(info, "the engine was stopped")
    feed.join(DEADLINE)
    assert info.run_dir not in EngineFeed._feeds
