"""The dashboards of a process together: what they send, and what of them is left when nobody looks any more."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from weakref import ref

import pytest

from nbengine.client.observe.block_map import BlockMap
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.dashboard import open_dashboards, widget
from nbengine.widgets.dashboard import plain as plain_module
from nbengine.widgets.dashboard.frames import FrameBuilder
from nbengine.widgets.dashboard.open_dashboards import OpenDashboard
from nbengine.widgets.dashboard.plain import PlainDashboard
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.dashboard.widget import Dashboard
from nbengine.widgets.following.feed import EngineFeed
from nbengine.widgets.open_views import OpenViews
from tests.unit.widgets.dashboards import SmallEngine, busy_engine, state_of
from tests.unit.widgets.publishing import DEADLINE, Deaf, Publisher


@pytest.fixture(autouse=True)
def alone(info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenViews[OpenDashboard]]:
    """Check that nothing is left of other tests, and of this one no thread."""
    views = OpenViews[OpenDashboard](16)
    for module in (open_dashboards, plain_module, widget):
        monkeypatch.setattr(module, "OPEN", views)
    yield views
    feed = EngineFeed._feeds.get(info.run_dir)
    EngineFeed.announce_end(info, "the test is over")
    if feed is not None:
        feed.join(DEADLINE)
        assert not feed.is_running


def test_beyond_the_most_the_dashboard_that_was_not_looked_at_for_longest_is_closed(
    info: ConnectionInfo, publisher: Publisher, alone: OpenViews[OpenDashboard]
) -> None:
    alone.most = 3
    heard, displayed, plain = Dashboard(info), Dashboard(info), PlainDashboard(info)
    for view in (heard, displayed, plain):
        view._ipython_display_()
    displayed._ipython_display_()
    heard._handle_custom_msg({"kind": "alive"}, [])
    assert not any(view.is_closed for view in (heard, displayed, plain))
    latest = [Dashboard(info), Dashboard(info)]
    latest[0]._ipython_display_()
    latest[1]._ipython_display_()
    assert [view.is_closed for view in (heard, displayed, plain, *latest)] == [
        False,
        True,
        True,
        False,
        False,
    ]
    assert "· idle" in displayed.static()["text/plain"]
    assert set(alone) == {heard, *latest}


def test_what_was_sent_does_not_keep_the_blocks_of_its_time() -> None:
    engine, builder = busy_engine(), FrameBuilder(lambda _: "")
    assert builder.build(state_of(engine)) is not None
    blocks = ref(engine.mirror.blocks)
    engine.mirror.blocks = BlockMap(60, 4)
    gc.collect()
    assert blocks() is None
    frame = builder.build(state_of(engine))
    assert frame is not None
    assert [len(buffer) for buffer in frame.buffers] == [4 * 60]


def test_the_plain_one_shares_the_way_to_the_browser(
    info: ConnectionInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(plain_module, "LINE", Throttle(0.0, 1000.0, 0.0, lambda: now))
    monkeypatch.setattr(plain_module, "INTERVAL", 0.0)
    monkeypatch.setattr(plain_module, "DRAWING_SHARE", float("inf"))
    engine = SmallEngine(num_blocks=100)
    engine.add(10, 90)
    view = PlainDashboard(info, subscribe=lambda _: nullcontext(Deaf()))
    view._throttle = Throttle(0.0, 1e9, 0.0)

    def is_shown(state: str = "running") -> bool:
        engine.run(1)
        before = view._pictures.value
        with view._feed.state():
            view.on_state(state_of(engine, state=state))
        return bool(view._pictures.value != before)

    assert is_shown()
    size = len(view._pictures.value)
    now = 0.9 * size / 1000
    assert not is_shown()
    now = 2.0 * size / 1000
    assert is_shown()
    assert not is_shown()
    assert is_shown("ended"), "an end is always shown"


def test_a_plain_one_leaves_the_way_to_those_that_share_it(info: ConnectionInfo) -> None:
    engine = SmallEngine(num_blocks=100)
    engine.add(10, 90)
    engine.run(1)
    view = PlainDashboard(info, subscribe=lambda _: nullcontext(Deaf()))
    now = 0.0
    view._throttle = Throttle(0.0, 1000.0, 0.0, lambda: now)
    others = [PlainDashboard(info), PlainDashboard(info)]
    others[1]._pause.value = True
    with view._feed.state():
        view.on_state(state_of(engine))
    size = len(view._pictures.value)
    now = 1.9 * size / 1000
    assert not view._throttle.is_due
    now = 4.0 * size / 1000
    assert view._throttle.is_due
