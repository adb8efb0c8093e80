"""The dashboard's static page: read back with a parser, it has what the state has, and nothing of it is markup."""

from __future__ import annotations

import base64
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel, Rates
from nbengine.widgets.pictures.figures import header
from nbengine.widgets.pictures.html import MAX_TABLE_RANKS, page, pictures, static_bundle
from nbengine.widgets.pictures.svg_steps import MAX_LENGTH
from nbengine.widgets.pictures.text import MIN_WIDTH, cells, text_dashboard
from nbengine.widgets.waves.timeline import RankSpan, Span, WaveTimeline
from tests.support.thorough import amount
from tests.unit.widgets.dashboards import LABEL, START, SmallEngine, busy_engine, state_of, vast_mirror
from tests.unit.widgets.pictures import SVG, texts_fit

HOSTILE = """</text></svg></table><script>alert("1")</script><img src=x onerror='alert(2)'>&amp;\x00\x1b[31m\u202e]]>"""
VOID = {"img", "br", "hr"}


class Page(HTMLParser):
    """A parsed page: its elements, which must be closed in order, and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.images: dict[str, str] = {}
        self.rows: list[list[str]] = []
        self.text = ""
        self.attributes: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.attributes |= set(values)
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "img":
            head, _, data = (values["src"] or "").partition(",")
            assert head == "data:image/svg+xml;base64"
            self.images[values["alt"] or ""] = base64.b64decode(data).decode()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        data = data.replace("\N{NO-BREAK SPACE}", " ")
        self.text += data
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def engine() -> SmallEngine:
    return busy_engine()


@pytest.fixture(scope="module")
def state(engine: SmallEngine) -> DashboardState:
    return state_of(engine, own={"generate-11": True})


def test_the_page_has_only_what_untrusted_notebooks_show(state: DashboardState) -> None:
    html = Page(page(state))
    assert set(html.tags) <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "img", "span"}
    assert html.attributes <= {"style", "align", "cellpadding", "alt", "src"}
    assert list(html.images) == ["scheduler", "KV blocks", "step timeline"]
    for svg in html.images.values():
        root = ElementTree.fromstring(svg)
        assert "prefers-color-scheme:dark" in svg
        assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
        assert texts_fit(root)


def test_the_header_says_what_the_state_says(state: DashboardState) -> None:
    html = Page(page(state))
    figures = " · ".join(f"{name} {value}" for name, value in header(state))
    assert f"KV use {100 * state.stats.engines[0].kv_cache_usage:.3g} %" in figures
    assert figures in html.text
    assert html.text.startswith("random-tiny · engine demo · 1 engine core · cpu · float32 · running")
    assert "DP 2" in Page(page(replace(state, label=replace(LABEL, topology="DP 2 × TP 2")))).text
    assert "the engine has ended" in Page(page(replace(state, note="the engine has ended"))).text


def test_the_table_has_a_row_a_request_and_says_how_many_are_left_out(
    engine: SmallEngine, state: DashboardState
) -> None:
    html = Page(page(state))
    rows = {row[1].removeprefix("● "): row for row in html.rows if row[0].isdigit()}
    mirror = engine.mirror
    assert set(rows) == {
        view.added.request_id for view in (*mirror.requests.values(), *mirror.finished.values())
    }
    assert [row[1] for row in html.rows if row[1].startswith("●")] == ["● generate-11"]
    for view in mirror.requests.values():
        row = rows[view.added.request_id]
        assert row[2] == "running"
        assert row[5] == str(view.num_output_tokens)
    crowd = SmallEngine()
    for _ in range(45):
        crowd.add(4, 2)
    crowd.step()
    html = Page(page(state_of(crowd)))
    assert sum(row[0].isdigit() for row in html.rows) == 30
    assert "… and 15 more" in html.text


def test_several_engine_cores_are_shown_one_by_one_with_their_waves() -> None:
    engines = [busy_engine(rank, seed=rank) for rank in range(2)]
    spans = (Span(0.0, 1.0, {0: RankSpan(5, 0, 0, True, 3), 1: RankSpan(2, 3, 0, True, 1)}),)
    state = state_of(*engines, label=replace(LABEL, lock_step=True), waves=WaveTimeline("demo", True, spans))
    html = Page(page(state))
    assert list(html.images) == ["scheduler", "KV blocks", "step timeline", "waves"]
    for name in ("scheduler", "KV blocks", "step timeline"):
        text = "".join(ElementTree.fromstring(html.images[name]).itertext())
        assert "rank 0: " in text
        assert "rank 1: " in text
    assert "2 engine cores in lock step" in html.images["waves"]
    many = {rank: TraceMirror(rank) for rank in range(40)}
    stats = EngineStats([SchedulerStats(rank) for rank in range(40)])
    html = Page(page(replace(state, mirrors=many, stats=stats)))
    assert "… and 36 more engine cores" in html.images["KV blocks"]
    assert f"… and {40 - MAX_TABLE_RANKS} more" in html.text


def test_a_bundle_is_small_whatever_it_shows(state: DashboardState) -> None:
    vast = replace(state, mirrors={0: vast_mirror()})
    bundle = static_bundle(vast)
    assert set(bundle) == {"text/html", "text/plain"}
    assert sum(len(text.encode()) for text in bundle.values()) < 150_000
    ranks = {rank: vast_mirror(25_000, 64, seed=rank) for rank in range(4)}
    several = static_bundle(replace(state, mirrors=ranks))
    assert sum(len(text.encode()) for text in several.values()) < 180_000
    assert len(dict(pictures(vast, standalone=True))["step timeline"]) <= MAX_LENGTH


def test_hostile_names_stay_text_in_every_form() -> None:
    label = EngineLabel(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE, lock_step=True)
    engine = SmallEngine()
    engine.add(10, 5, name=HOSTILE)
    engine.add(10, 2, name=HOSTILE)
    engine.run(4)
    waves = WaveTimeline(HOSTILE, True, (Span(0.0, 1.0, {0: RankSpan(5, 0, 0, True, 3)}),))
    state = state_of(engine, label=label, state=HOSTILE, note=HOSTILE, own={HOSTILE: True}, waves=waves)
    bundle = static_bundle(state)
    html = Page(bundle["text/html"])
    assert not {"script", "svg"} & set(html.tags)
    assert html.tags["img"] == 4
    assert html.text.count("<script>alert") == 7, "model, four facts, state and note; not cut"
    for svg in (*html.images.values(), *(svg for _, svg in pictures(state, standalone=False))):
        root = ElementTree.fromstring(svg)
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
            *("svg", "style", "desc", "g", "title", "path", "rect", "text", "polyline", "circle")
        }
        assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)
    for text in (*bundle.values(), html.text):
        assert not re.search("[\x00\x1b\u202e]", text)


WORDS = st.text(max_size=30)
NUMBERS = st.integers(0, 2**40)


@st.composite
def states(draw: st.DrawFn) -> DashboardState:
    """Whatever an engine may publish, or a feed make of it."""
    maybe = st.none() | st.floats(0, 1e12)
    engines = []
    for rank in range(draw(st.integers(0, 3))):
        blocks = draw(st.integers(1, 80))
        engine = SmallEngine(
            rank=rank,
            num_blocks=max(blocks, 14),
            budget=draw(st.integers(1, 40)),
            max_seqs=draw(st.integers(1, 5)),
        )
        for _ in range(draw(st.integers(0, 6))):
            engine.add(
                draw(st.integers(1, 30)),
                draw(st.integers(1, 20)),
                group=draw(st.integers(-1, 1)),
                name=draw(WORDS),
            )
            engine.run(draw(st.integers(0, 4)))
        engines.append(engine)
    ranks = {
        rank: RankSpan(draw(NUMBERS), draw(NUMBERS), 0, draw(st.booleans()), draw(NUMBERS))
        for rank in range(len(engines))
    }
    waves = WaveTimeline(
        draw(WORDS), draw(st.booleans()), (Span(0.0, draw(st.floats(0.001, 1e6)), ranks),) if ranks else ()
    )
    state = state_of(
        *engines,
        label=EngineLabel(*draw(st.lists(WORDS, min_size=5, max_size=5)), lock_step=draw(st.booleans())),
        rates=Rates(*(draw(maybe) for _ in range(4)), memory_bytes=draw(st.none() | NUMBERS)),
        state=draw(WORDS),
        note=draw(WORDS),
        waves=waves,
    )
    stats = [
        SchedulerStats(rank, *(draw(NUMBERS) for _ in range(8))) for rank in range(draw(st.integers(0, 3)))
    ]
    return replace(state, stats=EngineStats(stats), time=draw(st.floats(START - 1e6, START + 1e9)))


@settings(max_examples=amount(15, thorough=600), suppress_health_check=[HealthCheck.too_slow])
@given(states(), st.integers(0, 140))
def test_any_state_has_a_form_that_can_be_read(state: DashboardState, width: int) -> None:
    html = Page(page(state))
    for svg in (*html.images.values(), *(svg for _, svg in pictures(state, standalone=False))):
        assert texts_fit(ElementTree.fromstring(svg))
    lines = text_dashboard(state, width).split("\n")
    assert max(map(cells, lines)) <= max(width, MIN_WIDTH)
    assert all(line.isprintable() for line in lines)
