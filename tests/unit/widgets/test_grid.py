"""The grid of a comparison: its layout, its estimate, and what is drawn of it."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typesetting import MATHEMATICS, typeset

from nbengine.widgets.grid.grid import MOST_COLUMNS, GridCell, layout_of
from nbengine.widgets.grid.html import GridHtml
from nbengine.widgets.grid.pace import WINDOW_SECONDS, AnswerCount, Pace
from nbengine.widgets.grid.text import final_text

AXES = st.lists(st.integers(1, 6), max_size=4).map(
    lambda sizes: [
        (f"axis{index}", [f"v{index}.{n}" for n in range(size)]) for index, size in enumerate(sizes)
    ]
)
HOSTILE = "</td><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


@given(AXES, st.data())
def test_the_cells_row_by_row_are_the_product_of_the_axes(
    axes: list[tuple[str, list[str]]], data: st.DataObject
) -> None:
    num_first = data.draw(st.integers(0, len(axes)))
    layout = layout_of(axes, num_first)
    assert layout.row_names[:num_first] == tuple(name for name, _ in axes[:num_first])
    assert layout.row_names + layout.column_names == tuple(name for name, _ in axes)
    assert len(layout.columns) <= MOST_COLUMNS
    cells = [row + column for row in layout.rows for column in layout.columns]
    assert cells == list(itertools.product(*(values for _, values in axes)))
    for index, values in enumerate(cells):
        assert layout.label(index) == " · ".join(
            f"{name} {value}" for (name, _), value in zip(axes, values, strict=True)
        )


def test_the_last_settings_become_columns_as_far_as_they_can_be_read() -> None:
    three, two, six = ("t", ["1", "2", "3"]), ("e", ["A", "B"]), ("s", list("abcdef"))
    assert layout_of([three], 0).column_names == ("t",)
    assert layout_of([three, two], 0).column_names == ("e",)
    assert layout_of([two, two], 0).row_names == ()
    assert layout_of([six], 0).row_names == ("s",)
    assert layout_of([two, three], 1).row_names == ("e",)


def test_the_rate_is_that_of_the_last_seconds() -> None:
    pace = Pace()
    assert pace.rate is None
    pace.take(0, 0)
    pace.take(1, 100)
    assert pace.rate == 100
    for moment in range(2, 12):
        pace.take(moment, 100 + 10 * (moment - 1))
    assert pace.rate == pytest.approx(10)
    assert WINDOW_SECONDS < 10


def test_before_the_first_end_the_limits_bound_the_time_left() -> None:
    pace = Pace()
    pace.take(0, 0)
    pace.take(1, 20)
    running = [AnswerCount(10, 50, ended=False)] * 2
    assert pace.seconds_left(running) == (80 / 20, False)
    assert pace.seconds_left([*running, AnswerCount(0, None, ended=False)]) is None
    assert Pace().seconds_left(running) is None


def test_then_the_ends_so_far_tell_how_long_the_others_will_be() -> None:
    pace = Pace()
    pace.take(0, 0)
    pace.take(1, 60)
    running = AnswerCount(20, 500, ended=False)
    ended = AnswerCount(20, 500, ended=True)
    # One end in 60 tokens: another 60 for each of the two that run.
    assert pace.seconds_left([running, running, ended]) == (2.0, True)
    # Nobody gets more than the limit; and one that has reached it says nothing about the ends.
    assert pace.seconds_left([AnswerCount(20, 30, ended=False), ended]) == (10 / 60, True)
    assert pace.seconds_left([running, AnswerCount(40, 40, ended=True)]) == (480 / 60, False)
    assert pace.seconds_left([ended, ended]) == (0, True)


def grid(cells: list[GridCell], names: tuple[str, str] = ("q", "t")) -> tuple[GridHtml, list[GridCell]]:
    rows = [f"{HOSTILE} {index}" for index in range(len(cells) // 2)]
    return GridHtml(layout_of([(names[0], rows), (names[1], ["0", HOSTILE])], 1)), cells


def bare(html: str) -> str:
    """HTML without the tags and attributes that the grid is made of."""
    return re.sub(r'</?(?:div|table|tbody|tr|td|th|b|span)(?: (?:class|style|scope)="[^"<>]*")*>', "", html)


@pytest.mark.parametrize("state", ["waiting", "running", "done", "failed"])
def test_nothing_in_a_grid_is_markup_but_its_own(state: str) -> None:
    cell = GridCell((HOSTILE, HOSTILE), state, HOSTILE, HOSTILE)
    drawer, cells = grid([cell] * 4, (HOSTILE, HOSTILE))
    for html in (drawer.live(HOSTILE, 0.5, cells), drawer.final(HOSTILE, cells, [HOSTILE])):
        text = bare(html)
        assert "<" not in text
        assert ">" not in text
        assert "alert(1)" in text
        assert html.count("<td ") == html.count("</td>") == 4


@pytest.mark.parametrize("state", ["running", "done", "failed"])
def test_nothing_in_a_grid_is_typeset(state: str) -> None:
    cell = GridCell((MATHEMATICS,), state, MATHEMATICS, MATHEMATICS)
    layout = layout_of([(MATHEMATICS, [MATHEMATICS, "$5"]), ("$", ["0", MATHEMATICS])], 1)
    drawer = GridHtml(layout)
    for shown in (drawer.live("$5", 0.5, [cell] * 4), drawer.final("$5", [cell] * 4, [MATHEMATICS])):
        assert shown.count("begin{align}") > 12
        assert "$" not in typeset(shown)


def test_a_streaming_cell_shows_the_end_of_its_text_and_the_last_grid_all_of_it() -> None:
    text = "begin " + "x" * 30_000 + " end"
    drawer, cells = grid([GridCell((text,), "running"), GridCell()])
    live, final = drawer.live("", 0, cells), drawer.final("", cells)
    assert "begin" not in live
    assert " end" in live
    assert text in final
    assert len(live) < 12_000


def test_the_size_of_a_grid_is_bounded() -> None:
    cells = [GridCell(("<" * 50_000,) * 2, "running", "3 tokens")] * 256
    drawer, cells = grid(cells)
    assert len(drawer.live("", 0, cells)) < 600_000
    final = drawer.final("", cells)
    assert "more characters" in final
    assert len(final) < 3_000_000


def test_only_what_has_changed_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    drawer, cells = grid([GridCell((f"text {index}",), "running") for index in range(8)])
    drawer.live("", 0, cells)
    drawn: list[int] = []
    original = GridHtml._cell

    def counted(self: GridHtml, index: int, *rest: object, **flags: bool) -> str:
        drawn.append(index)
        return original(self, index, *rest, **flags)  # type: ignore[arg-type]

    monkeypatch.setattr(GridHtml, "_cell", counted)
    cells[5] = GridCell(("new text",), "running")
    assert "new text" in drawer.live("", 0, cells)
    assert drawn == [5]


def test_plain_text_has_every_answer_under_its_settings() -> None:
    layout = layout_of([("q", ["one\ntwo"]), ("t", ["0", "1"])], 1)
    cells = [GridCell(("A", "B"), "done", "2 tokens"), GridCell((), "failed", "", "too long")]
    assert final_text(layout, cells, "2 answers", ["1 of 2 failed"]) == (
        "── q one two · t 0 ──\n1.\nA\n2.\nB\n[2 tokens]\n\n── q one two · t 1 ──\nfailed: too long\n\n"
        "[2 answers]\n[1 of 2 failed]"
    )
