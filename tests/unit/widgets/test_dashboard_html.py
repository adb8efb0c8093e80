"""The dashboard's static page: read back with a parser, it has what the state has, and nothing of it is markup."""

from __future__ import annotations

import base64
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nbengine.client.trace_mirror import BlockMap, TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.widgets.dashboard.palette import REQUESTS, ROLES, request_color
from nbengine.widgets.dashboard.step_frames import DECODE, PROMPT, RECOMPUTED
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel, Rates
from nbengine.widgets.pictures.blocks import cells_of
from nbengine.widgets.pictures.figures import header
from nbengine.widgets.pictures.html import MAX_TABLE_RANKS, page, pictures, static_bundle
from nbengine.widgets.pictures.steps import grid_of
from nbengine.widgets.pictures.svg_blocks import PITCHES, geometry, levels
from nbengine.widgets.pictures.svg_parts import PAD, WIDTH
from nbengine.widgets.pictures.svg_steps import MAX_LENGTH, MAX_STEPS
from nbengine.widgets.pictures.text import MIN_WIDTH, cells, text_dashboard
from nbengine.widgets.waves.timeline import RankSpan, Span, WaveTimeline
from tests.unit.widgets.dashboards import LABEL, START, SmallEngine, busy_engine, state_of, vast_mirror
from tests.unit.widgets.pictures import SVG, Stroke, strokes_in, texts_fit

HOSTILE = """</text></svg></table><script>alert("1")</script><img src=x onerror='alert(2)'>&amp;\x00\x1b[31m\u202e]]>"""
VOID = {"img", "br", "hr"}


class Page(HTMLParser):
    """Which elements there are, whether they are closed in order, and the text of table cells."""

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


def picture(state: DashboardState, name: str) -> ElementTree.Element:
    return ElementTree.fromstring(dict(pictures(state, standalone=True))[name])


def held_strokes(root: ElementTree.Element) -> dict[str, list[Stroke]]:
    groups = [group for group in root.iter(f"{SVG}g") if group.get("data-role") == "held"]
    return {group.get("data-color", ""): strokes_in(group) for group in groups}


def cells_by_color(root: ElementTree.Element, pitch: int) -> Counter[str]:
    """How many cells are painted in each colour; a stroke's dashes are its cells."""
    return Counter(
        {
            color: sum(round((stroke.length + 1) / pitch) for stroke in strokes)
            for color, strokes in held_strokes(root).items()
        }
    )


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


def test_every_block_is_a_cell_in_the_colour_of_its_request(
    engine: SmallEngine, state: DashboardState
) -> None:
    blocks = engine.mirror.blocks
    root = picture(state, "KV blocks")
    pitch = PITCHES[0][0]
    held = [block for block in range(blocks.num_blocks) if blocks.ref_counts[block]]
    expected = Counter(request_color(int(blocks.holder[block])) for block in held)
    assert len(expected) > 1
    assert cells_by_color(root, pitch) == expected
    columns = int(WIDTH - 2 * PAD) // pitch
    painted = {
        (column, row)
        for strokes in held_strokes(root).values()
        for stroke in strokes
        for column, row in stroke.cells(pitch)
    }
    rows = {row for _, row in painted}
    assert len(rows) == 2
    first = min(rows)
    ids = {column + columns * round((row - first) / pitch) for column, row in painted}
    assert ids == set(held)
    ground = next(group for group in root.iter(f"{SVG}g") if group.get("data-role") == "free")
    assert sum(round((stroke.length + 1) / pitch) for stroke in strokes_in(ground)) == blocks.num_blocks


def test_shared_blocks_have_their_number_of_references(engine: SmallEngine, state: DashboardState) -> None:
    shared = sorted(int(count) for count in engine.mirror.blocks.ref_counts if count > 1)
    assert shared
    root = picture(state, "KV blocks")
    (group,) = (group for group in root.iter(f"{SVG}g") if group.get("data-role") == "shared")
    digits = "".join(text.text or "" for text in group.iter(f"{SVG}text"))
    assert sorted(map(int, digits)) == shared
    many = BlockMap(4, 4)
    many.ref_counts[:] = [0, 1, 9, 37]
    mirror = TraceMirror(0)
    mirror.blocks = many
    root = picture(replace(state, mirrors={0: mirror}), "KV blocks")
    (group,) = (group for group in root.iter(f"{SVG}g") if group.get("data-role") == "shared")
    assert "".join(text.text or "" for text in group.iter(f"{SVG}text")) == "9+"


def test_cached_and_free_blocks_are_grey_and_the_line_counts_them() -> None:
    engine = SmallEngine(num_blocks=30)
    engine.add(20, 2, group=0)
    engine.run(50)
    root = picture(state_of(engine), "KV blocks")
    assert held_strokes(root) == {}
    (cached,) = (group for group in root.iter(f"{SVG}g") if group.get("data-role") == "cached")
    assert sum(round((stroke.length + 1) / 16) for stroke in strokes_in(cached)) == 5
    text = "".join(root.itertext())
    assert "30 blocks of 4 tokens: 0 held (0 shared), 5 cached and free, 25 free" in text


def test_many_blocks_share_cells_and_their_heights_add_up(state: DashboardState) -> None:
    mirror = vast_mirror()
    vast = replace(state, mirrors={0: mirror})
    root = picture(vast, "KV blocks")
    pitch, columns, rows = geometry(100_000, 1)
    assert (pitch, rows) == PITCHES[-1]
    cells = cells_of(mirror.blocks, columns * rows)
    expected = Counter(REQUESTS[index] for index in cells.color if index >= 0)
    assert cells_by_color(root, pitch) == expected
    heights = levels(cells.held, cells.total).sum()
    drawn = sum(
        stroke.thickness / (pitch - 1) * 8 * round((stroke.length + 1) / pitch)
        for strokes in held_strokes(root).values()
        for stroke in strokes
    )
    assert drawn == pytest.approx(heights)
    feet = {
        round((stroke.y + stroke.thickness / 2) % pitch, 1)
        for strokes in held_strokes(root).values()
        for stroke in strokes
    }
    assert max(feet) - min(feet) <= 0.2, "all stand on the feet of their cells"
    assert heights / 8 / len(cells.total) == pytest.approx(0.6, abs=0.03), "60 of 100 blocks are held"
    text = "".join(root.itertext())
    assert "60,035 held (20,042 shared), 20,099 cached and free, 19,866 free" in text
    assert "a cell: 61 blocks" in text


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=30))
def test_what_is_there_is_seen_and_only_the_whole_is_full(parts: list[tuple[int, int]]) -> None:
    part = np.array([min(a, b) for a, b in parts])
    total = np.array([b for _, b in parts])
    found = levels(part, total)
    assert ((found == 0) == (part == 0)).all()
    assert ((found == 8) == (part == total)).all()
    assert (np.abs(found / 8 - part / total) <= 1 / 8).all()


def test_the_timeline_has_a_bar_for_each_part_of_a_request(
    engine: SmallEngine, state: DashboardState
) -> None:
    root = picture(state, "step timeline")
    groups = {int(group.get("data-number", "-1")): group for group in root.iter(f"{SVG}g")}
    grid = grid_of(engine.mirror, MAX_STEPS[0], 20)
    assert set(groups) == {row.number for row in grid.rows}
    width = (WIDTH - PAD - 152) / len(grid.steps)
    marks = Counter[str]()
    for row in grid.rows:
        group = groups[row.number]
        drawn = {stroke.color: 0 for stroke in strokes_in(group)}
        for stroke in strokes_in(group):
            drawn[stroke.color] += round((stroke.length + 1) / width)
        kinds = Counter(kind for kind in row.kinds if kind is not None)
        assert drawn == {
            ROLES[name]: kinds[kind]
            for name, kind in (("prefill", PROMPT), ("decode", DECODE), ("recompute", RECOMPUTED))
            if kinds[kind]
        }
        swatch = group.find(f"{SVG}rect")
        assert swatch is not None
        assert swatch.get("fill") == request_color(row.number)
        if row.finished is not None:
            ends = [
                path.get("d") or ""
                for path in group.iter(f"{SVG}path")
                if path.get("stroke") == "currentColor"
            ]
            assert float(ends[0][1:].split()[0]) == pytest.approx(152 + (row.finished + 1) * width, abs=0.06)
        for path in group.iter(f"{SVG}path"):
            if not path.get("stroke-dasharray"):
                paint = path.get("fill") if path.get("fill") != "none" else path.get("stroke")
                marks[paint or ""] += (path.get("d") or "").count("M")
    assert marks == {
        ROLES["hit"]: sum(len(row.hits) for row in grid.rows),
        ROLES["preempted"]: sum(len(row.preempted) for row in grid.rows),
        "currentColor": sum(row.finished is not None for row in grid.rows),
    }
    assert min(marks.values()) > 0


def test_the_scheduler_has_a_bar_a_step_split_by_prefill_and_decode(
    engine: SmallEngine, state: DashboardState
) -> None:
    root = picture(state, "scheduler")
    groups = {group.get("data-role", ""): strokes_in(group) for group in root.iter(f"{SVG}g")}
    steps = list(engine.mirror.steps)
    scale = 56 / max(step.num_prefill_tokens + step.num_decode_tokens for step in steps)
    for role, tokens in (
        ("prefill", [step.num_prefill_tokens for step in steps]),
        ("decode", [step.num_decode_tokens for step in steps]),
    ):
        heights = [round(stroke.length / scale) for stroke in groups[role]]
        assert heights == [count for count in tokens if count]
    foot = groups["decode"][0].y
    assert {stroke.y for stroke in groups["decode"]} == {foot}
    upon = [step.num_decode_tokens for step in steps if step.num_prefill_tokens]
    assert [round((foot - stroke.y) / scale) for stroke in groups["prefill"]] == upon
    assert sum(upon) > 0
    text = "".join(root.itertext())
    assert "budget 24" in text
    assert f"preempted {engine.mirror.stats.num_preemptions}×" in text
    assert f"waiting ≤ {max(step.num_waiting for step in steps)}" in text


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


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(states(), st.integers(0, 140))
def test_any_state_has_a_form_that_can_be_read(state: DashboardState, width: int) -> None:
    html = Page(page(state))
    for svg in (*html.images.values(), *(svg for _, svg in pictures(state, standalone=False))):
        assert texts_fit(ElementTree.fromstring(svg))
    lines = text_dashboard(state, width).split("\n")
    assert max(map(cells, lines)) <= max(width, MIN_WIDTH)
    assert all(line.isprintable() for line in lines)
