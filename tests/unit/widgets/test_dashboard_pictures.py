"""The dashboard's pictures, read back from their strokes: every block, every part of a request, every step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.client.observe.trace_mirror import BlockMap, TraceMirror
from nbengine.widgets.dashboard.palette import REQUESTS, ROLES, request_color
from nbengine.widgets.dashboard.step_frames import DECODE, PROMPT, RECOMPUTED
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.blocks import cells_of
from nbengine.widgets.pictures.html import pictures
from nbengine.widgets.pictures.steps import grid_of
from nbengine.widgets.pictures.svg_blocks import PITCHES, geometry, levels
from nbengine.widgets.pictures.svg_parts import PAD, WIDTH
from nbengine.widgets.pictures.svg_steps import MAX_STEPS
from tests.unit.widgets.dashboards import SmallEngine, busy_engine, state_of, vast_mirror
from tests.unit.widgets.pictures import SVG, Stroke, strokes_in


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
    """Count the cells that are painted in each colour; a stroke's dashes are its cells."""
    return Counter(
        {
            color: sum(round((stroke.length + 1) / pitch) for stroke in strokes)
            for color, strokes in held_strokes(root).items()
        }
    )


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
