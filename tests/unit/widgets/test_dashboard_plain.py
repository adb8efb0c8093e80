"""The dashboard of core widgets, without a frontend: what its widgets hold, and what its controls do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from nbengine.errors import NBEngineError
from nbengine.runtime.connection import ConnectionInfo
from nbengine.widgets.dashboard import plain as plain_module
from nbengine.widgets.dashboard.plain import INTERVAL, PlainDashboard
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.following.feed import EngineFeed
from tests.unit.widgets.dashboards import LABEL, SmallEngine, busy_engine, state_of
from tests.unit.widgets.publishing import DEADLINE, Deaf, make_info

HOSTILE = "</div><script>alert(1)</script>"


class Clock:
    """Goes on only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Reader:
    """The widgets by what they are for."""

    def __init__(self, dashboard: PlainDashboard) -> None:
        header, controls, pictures, requests = dashboard.widget.children
        self.header, self.pictures, self.requests = header, pictures, requests
        self.pause, self.rank, self.choice, self.abort, self.answer = controls.children

    @property
    def text(self) -> str:
        """Return all that is shown."""
        return str(self.header.value + self.pictures.value + self.requests.value + self.answer.value)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def plain_dashboard(info: ConnectionInfo, clock: Clock) -> Iterator[PlainDashboard]:
    dashboard = PlainDashboard(info, subscribe=lambda _: nullcontext(Deaf()), clock=clock)
    yield dashboard
    feed = dashboard._feed
    dashboard.close()
    feed.join(DEADLINE)
    assert not feed.is_running


@pytest.fixture
def dashboard(info: ConnectionInfo, clock: Clock) -> Iterator[PlainDashboard]:
    yield from plain_dashboard(info, clock)


@pytest.fixture
def reader(dashboard: PlainDashboard) -> Reader:
    return Reader(dashboard)


@pytest.fixture
def engine() -> SmallEngine:
    engine = SmallEngine(num_blocks=100)
    for _ in range(3):
        engine.add(10, 20)
    engine.run(5)
    return engine


def test_it_shows_the_pictures_in_the_colours_of_the_page(dashboard: PlainDashboard, reader: Reader) -> None:
    assert "no state yet" in reader.header.value
    assert dashboard.show(state_of(busy_engine()))
    assert "1,234/s" in reader.header.value
    assert reader.pictures.value.count("<svg ") == 3
    assert "currentColor" in reader.pictures.value
    assert "prefers-color-scheme" not in reader.pictures.value
    assert "generate-13" in reader.requests.value


def test_it_is_drawn_twice_a_second_at_most(
    dashboard: PlainDashboard, reader: Reader, clock: Clock, engine: SmallEngine
) -> None:
    assert dashboard.show(state_of(engine))
    before = reader.text
    engine.run(5)
    clock.now += INTERVAL * 0.9
    assert not dashboard.show(state_of(engine))
    assert reader.text == before
    clock.now += INTERVAL * 0.2
    assert dashboard.show(state_of(engine))
    assert reader.text != before


def test_what_takes_long_to_draw_is_drawn_more_seldom(
    dashboard: PlainDashboard, clock: Clock, engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(state: DashboardState) -> str:
        clock.now += 0.2
        return str(state.time)

    monkeypatch.setattr(plain_module, "header_part", slow)
    assert dashboard.show(state_of(engine))
    engine.run(5)
    clock.now += 1.7
    assert not dashboard.show(state_of(engine))
    clock.now += 0.2
    assert dashboard.show(state_of(engine))


def test_what_is_sent_is_counted(
    dashboard: PlainDashboard, reader: Reader, clock: Clock, engine: SmallEngine
) -> None:
    size = dashboard.show(state_of(engine))
    assert len(reader.text) <= size <= len(reader.text.encode()) + 200
    clock.now += 1
    assert dashboard.show(state_of(engine)) == 0, "it looks the same"


def test_a_pause_holds_the_picture_until_the_end(
    dashboard: PlainDashboard, reader: Reader, clock: Clock, engine: SmallEngine
) -> None:
    dashboard.show(state_of(engine))
    reader.pause.value = True
    before = reader.text
    clock.now += 5
    engine.run(3)
    assert not dashboard.show(state_of(engine))
    assert reader.text == before
    reader.pause.value = False
    assert dashboard.show(state_of(engine))
    reader.pause.value = True
    dashboard.on_state(state_of(engine, state="ended", note="it was stopped"))
    assert "it was stopped" in reader.text
    assert all(control.disabled for control in (reader.pause, reader.choice, reader.abort))


def test_abort_names_the_request_that_is_chosen(
    dashboard: PlainDashboard,
    reader: Reader,
    clock: Clock,
    engine: SmallEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def abort(feed: EngineFeed, _: DashboardState, rank: int, number: int) -> None:
        assert feed is dashboard._feed
        asked.append((rank, number))
        if number == 2:
            raise NBEngineError(HOSTILE)

    monkeypatch.setattr(plain_module, "abort", abort)
    assert reader.abort.disabled, "there is no request"
    dashboard.show(state_of(engine))
    assert not reader.abort.disabled
    assert [value for _, value in reader.choice.options] == [(0, 0), (0, 1), (0, 2)]
    reader.choice.value = (0, 1)
    reader.abort.click()
    assert asked == [(0, 1)]
    assert "#1" in reader.answer.value
    reader.choice.value = (0, 2)
    engine.abort(0)
    engine.run(1)
    clock.now += 1
    dashboard.show(state_of(engine))
    assert [value for _, value in reader.choice.options] == [(0, 1), (0, 2)]
    assert reader.choice.value == (0, 2), "what was chosen stays chosen"
    reader.abort.click()
    assert "not aborted: &lt;/div&gt;&lt;script&gt;" in reader.answer.value
    engine.run(100)
    clock.now += 1
    dashboard.show(state_of(engine))
    assert reader.choice.options == ()
    assert reader.abort.disabled
    reader.abort.click()
    assert asked == [(0, 1), (0, 2)]


def test_one_engine_core_of_several_can_be_chosen(
    dashboard: PlainDashboard, reader: Reader, clock: Clock
) -> None:
    engines = [SmallEngine(rank=rank, num_blocks=40 + rank) for rank in range(2)]
    for engine in engines:
        engine.add(10, 10, name=f"of rank {engine.mirror.engine_index}")
        engine.run(3)
    dashboard.show(state_of(engines[0]))
    assert reader.rank.layout.display == "none"
    clock.now += 1
    dashboard.show(state_of(*engines))
    assert reader.rank.layout.display is None
    assert "40 blocks" in reader.text
    assert "41 blocks" in reader.text
    assert [label for label, _ in reader.choice.options] == ["rank 0 #0 of rank 0", "rank 1 #0 of rank 1"]
    reader.rank.value = 1
    clock.now += 1
    dashboard.show(state_of(*engines))
    assert "40 blocks" not in reader.text
    assert "41 blocks" in reader.text
    assert [value for _, value in reader.choice.options] == [(1, 0)]
    clock.now += 1
    dashboard.show(state_of(engines[0]))
    assert reader.rank.value == -1, "it has gone"
    assert "40 blocks" in reader.text


def test_a_closed_one_shows_nothing_more(dashboard: PlainDashboard, reader: Reader, clock: Clock) -> None:
    state = state_of(busy_engine())
    dashboard.show(state)
    before = reader.text
    dashboard.close()
    dashboard.close()
    clock.now += 5
    assert not dashboard.show(replace(state, state="ended"))
    assert reader.text == before
    assert reader.pause.disabled


@pytest.fixture
def hostile(info: ConnectionInfo, tmp_path: Path, clock: Clock) -> Iterator[PlainDashboard]:
    yield from plain_dashboard(make_info(tmp_path / "hostile", HOSTILE, model=HOSTILE), clock)


def test_hostile_names_stay_text(hostile: PlainDashboard) -> None:
    dashboard, reader = hostile, Reader(hostile)
    assert "<script" not in reader.text
    engine = SmallEngine()
    engine.add(10, 10, name=HOSTILE)
    engine.run(2)
    state: DashboardState = state_of(engine, label=replace(LABEL, model=HOSTILE), note=HOSTILE)
    dashboard.show(state)
    assert "<script" not in reader.text
    assert reader.text.count("&lt;script&gt;") >= 4
