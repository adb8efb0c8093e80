"""The dashboard as text: what stands in which line, and that it fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.text import MIN_WIDTH, cells, cut, letter, padded, sparkline, text_dashboard
from tests.unit.widgets.dashboards import SmallEngine, busy_engine, state_of, vast_mirror


@pytest.fixture(scope="module")
def engine() -> SmallEngine:
    return busy_engine()


@pytest.fixture(scope="module")
def state(engine: SmallEngine) -> DashboardState:
    return state_of(engine)


def line_after(lines: list[str], start: str) -> int:
    return next(index for index, line in enumerate(lines) if line.startswith(start)) + 1


@pytest.mark.parametrize("width", [0, MIN_WIDTH, 60, 80, 100, 160])
def test_no_line_is_wider_than_asked(state: DashboardState, width: int) -> None:
    vast = replace(state, mirrors={0: vast_mirror(5000, 64), 1: vast_mirror(5000, 64)})
    for shown in (state, vast):
        lines = text_dashboard(shown, width).split("\n")
        assert max(map(cells, lines)) <= max(width, MIN_WIDTH)


def test_a_hundred_columns_hold_everything(state: DashboardState) -> None:
    text = text_dashboard(state)
    assert "…" not in text.replace("… and", "")
    assert text.startswith(
        "random-tiny · engine demo · 1 engine core · cpu · float32 · running\ntokens in 1,234/s"
    )
    for word in ("KV use 46.7 %", "again, after a preemption", "◆ prefix hit", "2-9 + number of holders"):
        assert word in text


def test_every_block_is_a_character(engine: SmallEngine, state: DashboardState) -> None:
    lines = text_dashboard(state).split("\n")
    row = lines[line_after(lines, "KV 60 blocks")].strip()
    blocks = engine.mirror.blocks
    assert len(row) == blocks.num_blocks
    for block, character in enumerate(row):
        references = int(blocks.ref_counts[block])
        if references > 1:
            assert character == str(references)
        elif references == 1:
            assert character == letter(int(blocks.holder[block]))
        else:
            assert character == ("░" if blocks.cached[block] else "·")


def test_a_step_is_a_column(engine: SmallEngine, state: DashboardState) -> None:
    lines = text_dashboard(state).split("\n")
    rows = [line for line in lines if line.startswith("  l #11 ")]
    assert len(rows) == 1
    steps = list(engine.mirror.steps)[-len(rows[0][23:]) :]
    for character, step in zip(rows[0][23:], steps, strict=True):
        if 11 in step.preempted:
            assert character == "×"
        elif 11 in step.numbers:
            place = list(step.numbers).index(11)
            hit = 11 in step.admitted and step.num_computed[place] > 0
            assert character == (
                "◆" if hit else "█" if 11 in step.prefills and 11 not in step.resumed else "▄"
            )
        else:
            assert character == " "


def test_a_sparkline_is_as_high_as_the_greatest_value() -> None:
    assert sparkline([0, 1, 4, 8], 10) == "▁▁▄█"
    assert sparkline([None, 8, None], 10) == " █ "
    assert sparkline([0, 8, 1, 2, None, None], 3) == "█▂ "
    assert sparkline([1, 2], 10, most=16) == "▁▁"
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline([], 10) == ""


@given(st.text(max_size=40), st.integers(1, 30))
def test_text_is_cut_and_filled_by_places(text: str, width: int) -> None:
    assert cells(cut(text, width)) <= width
    assert cells(padded(text, width)) == width


def test_wide_characters_take_two_places() -> None:
    assert cells("日本a") == 5
    assert cut("日本語", 4) == "日…"
    assert padded("日本語", 4) == "日… "


def test_without_steps_or_engines_it_says_so() -> None:
    text = text_dashboard(state_of(SmallEngine()))
    assert "requests: no steps yet" in text
    assert "tokens a step: no steps yet, budget 24" in text
    assert "no requests yet" in text
    assert "requests –" in text_dashboard(state_of())
