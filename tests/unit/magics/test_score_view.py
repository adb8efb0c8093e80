"""Scores as a kernel shows them: marks in the cells, a table above the grid, a widget, and Markdown in grids."""

from __future__ import annotations

import asyncio
import builtins
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.magics.extension import Extension, unload
from nbengine.widgets.grid.widget import ScoresWidget
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until

VIEW = "application/vnd.jupyter.widget-view+json"
HOSTILE = "</td></table><script>alert(1)</script>"


@pytest.fixture
def widgets(monkeypatch: pytest.MonkeyPatch) -> list[ScoresWidget]:
    """The widgets that are made."""
    made: list[ScoresWidget] = []

    class Recorded(ScoresWidget):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr("nbengine.widgets.grid.widget.ScoresWidget", Recorded)
    return made


def define(shell: InteractiveShell) -> None:
    shell.user_ns["words"] = ["sea", HOSTILE]
    shell.user_ns["longer"] = lambda result, row: len(row["words"]) + row["temperature"]
    shell.user_ns["hot"] = lambda result, row: row["temperature"] > 0 and row["words"] == "sea"

    def fails(result: Any, row: Any) -> None:
        raise ValueError(HOSTILE)

    shell.user_ns["fails"] = fails


LINE = "%%generate --each words --temperature 0,1 --score longer,hot,fails -o grid\n{words}\n"


async def test_a_table_of_means_stands_above_the_grid_with_marks(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[ScoresWidget]
) -> None:
    define(kernel_shell)
    (await run(kernel_shell, LINE)).raise_error()
    table, grid = publisher(kernel_shell).outputs()
    assert set(table) == {"text/plain", "text/html", VIEW}
    lines = [" ".join(line.split()) for line in table["text/plain"].splitlines()]
    assert lines[0] == "setting longer hot fails"
    assert lines[2].startswith("temperature 1 21.5 (-")
    assert "n 2 50 % (9 to 91 %), n 2 none, 2 failed" in lines[2]
    assert lines[3] == "[mean, 95 % interval, number of scores]"
    # Shares differ by points; what is "none" has no pair of scores.
    assert lines[4:] == [
        "against temperature 0 longer hot fails",
        "temperature 1 +1 (1 to 1), n 2 +50 points (-56 to 100), n 2 none",
        "[difference over the same prompts, 95 % interval, number of prompts]",
    ]
    assert table["text/html"].count("<tr>") == 5
    assert "+50 points (-56 to 100), n 2</td>" in table["text/html"]
    (widget,) = widgets
    assert table[VIEW]["model_id"] == widget.model_id
    assert f'<table id="{widget.grid}" ' in grid["text/html"]
    assert [f'<tr data-row="{row}" ' in grid["text/html"] for row in range(3)] == [True, True, False]
    assert ">longer: 39</span>" in grid["text/html"]
    assert ">hot: yes</span>" in grid["text/html"]
    assert grid["text/html"].count("failed, ValueError: &lt;/td&gt;") == 4
    assert "<script>" not in grid["text/html"] + table["text/html"]
    assert "[longer: 3 · hot: no · fails: failed, ValueError: </td>" in grid["text/plain"]


async def test_the_widget_has_the_rows_numbers_and_which_of_them_differ(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[ScoresWidget]
) -> None:
    define(kernel_shell)
    (await run(kernel_shell, LINE.replace("longer,", ""))).raise_error()
    (widget,) = widgets
    assert widget.order == {"hot": [0.5, 0.0], "fails": [None, None]}
    assert widget.differing == [True, False]
    assert widget.summary["scores"] == ["hot", "fails"]
    assert [row["label"] for row in widget.summary["rows"]] == ["temperature 0", "temperature 1"]
    differences = widget.summary["differences"]
    assert (differences["title"], differences["scores"]) == ("against temperature 0", ["hot", "fails"])
    assert differences["rows"] == [
        {"label": "temperature 1", "cells": ["+50 points (-56 to 100), n 2", "none"]}
    ]


async def test_settings_that_are_rows_differ_by_their_prompt(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[ScoresWidget]
) -> None:
    kernel_shell.user_ns["odd"] = lambda result, row: row["w"] == "a" and row["seed"] == 3
    (await run(kernel_shell, "%%generate --each w=a,b --seed 1,2,3,4,5 --score odd\n{w}\n")).raise_error()
    (widget,) = widgets
    assert widget.order == {"odd": [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]}
    assert widget.differing == [True] * 5 + [False] * 5


async def test_scores_appear_while_other_answers_are_written(
    kernel_shell: InteractiveShell, engine: FakeClient, widgets: list[ScoresWidget]
) -> None:
    engine.words = None
    kernel_shell.user_ns["size"] = lambda result, row: len(result.text)
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2 --score size\nhi\n"))
    await until(lambda: len(engine.collectors) == 2)
    table, _ = publisher(kernel_shell).outputs()
    assert table["text/plain"].count("none") == 2
    engine.emit("five!", "stop", 1)
    await until(lambda: "size: 5" in publisher(kernel_shell).outputs()[1]["text/html"])
    table, _ = publisher(kernel_shell).outputs()
    assert "seed 2   5, n 1" in table["text/plain"]
    assert "against" not in table["text/plain"]
    assert widgets == []
    engine.emit("no", "stop", 0)
    (await cell).raise_error()
    table, _ = publisher(kernel_shell).outputs()
    assert VIEW in table
    assert "against seed 1  size\nseed 2          +3, n 1\n" in table["text/plain"]


async def test_an_interrupt_keeps_the_scores_that_there_are(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    kernel_shell.user_ns["size"] = lambda result, row: len(result.text)
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2 --score size -o grid\nhi\n"))
    await until(lambda: len(engine.collectors) == 2)
    engine.emit("five!", "stop", 1)
    engine.emit("half", None, 0)
    await until(lambda: "size: 5" in publisher(kernel_shell).outputs()[1]["text/html"])
    cell.cancel()
    assert isinstance((await cell).error_in_exec, KeyboardInterrupt)
    assert [(row["text"], row["size"]) for row in kernel_shell.user_ns["grid"].rows()] == [
        ("half", None),
        ("five!", 5),
    ]
    assert "size: 5" in publisher(kernel_shell).outputs()[1]["text/plain"]


async def test_without_anywidget_there_is_the_table(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        if name in ("nbengine.widgets.grid.widget", "nbengine.widgets.grid.cells_widget"):
            raise ImportError("no anywidget here")
        return original(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    define(kernel_shell)
    (await run(kernel_shell, LINE)).raise_error()
    outputs = publisher(kernel_shell).outputs()
    assert [set(output) for output in outputs] == [{"text/plain", "text/html"}] * 2
    assert "against temperature 0" in outputs[0]["text/html"]


@pytest.mark.parametrize("end", ["%engine stop", "unload", "superfluous"])
async def test_a_widget_stays_when_its_engine_is_left_and_is_closed_with_the_extension_or_as_superfluous(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    widgets: list[ScoresWidget],
    end: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    define(kernel_shell)
    (await run(kernel_shell, LINE)).raise_error()
    if end == "unload":
        unload(kernel_shell)
    elif end == "superfluous":
        monkeypatch.setattr(Extension.loaded[kernel_shell].session.ongoing.views, "most", 1)
        (await run(kernel_shell, LINE)).raise_error()
    else:
        (
            await kernel_shell.run_cell_async(end, transformed_cell=kernel_shell.transform_cell(end))
        ).raise_error()
    stays = end == "%engine stop"
    assert (VIEW in publisher(kernel_shell).outputs()[0]) is stays
    assert (widgets[0].comm is not None) is stays


async def test_markdown_is_rendered_in_the_cells_of_a_grid_and_nothing_leaves_its_cell(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.user_ns["words"] = ["two\n\nlines", "**x** $5"]
    engine.turns = [["**bold** & $5\n\n", "```python\n1 < 2"], [HOSTILE]]
    (await run(kernel_shell, "%%generate --each words -f markdown\n{words}\n")).raise_error()
    (output,) = publisher(kernel_shell).outputs()
    assert set(output) == {"text/plain", "text/markdown", VIEW}
    blocks = output["text/markdown"].split("\n\n")
    # Each answer is Markdown between empty lines; everything else is one line of HTML.
    assert blocks[1:3] == ["**bold** & $5", "```python\n1 < 2\n```"]
    assert blocks[4] == "&lt;/td>&lt;/table>&lt;script>alert(1)&lt;/script>"
    html = [blocks[0], blocks[3], blocks[5]]
    assert len(blocks) == 6
    assert all(part.startswith(("<table ", "</div>")) for part in html)
    assert all("\n" not in part and "$" not in part for part in html)
    assert "two&#10;&#10;lines" in html[0]
    assert "**x** &#36;5" in html[1]
    assert "── words **x** $5 ──\n</td></table>" in output["text/plain"]


async def test_differences_are_shown_as_words_whatever_the_format(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    for _ in range(2):
        (await run(kernel_shell, "%%generate --seed 1,2 -f markdown --diff\nhi\n")).raise_error()
    first, second = publisher(kernel_shell).outputs()
    assert "text/markdown" in first
    assert "text/html" in second
