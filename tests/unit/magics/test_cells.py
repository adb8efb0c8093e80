"""The grid's cells after the end: rows as they are asked for, thumbs, pins, the same again, and differences."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine import runs
from nbengine.errors import RequestError
from nbengine.widgets.grid.cells_widget import CellsWidget
from nbengine.widgets.grid.widget import ScoresWidget
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until

LINE = "%%generate --each words --temperature 0,1 -o grid{flags}\n{{words}}\n"


class Cells:
    """A comparison in a kernel, its widget, and the messages that go to the script."""

    def __init__(self, shell: InteractiveShell, widget: CellsWidget) -> None:
        self.shell, self.widget = shell, widget
        self.sent: list[dict[str, Any]] = []
        widget.send = lambda content, buffers=None: self.sent.append(content)

    def ask(self, content: object) -> list[dict[str, Any]]:
        """Let the script say something; return what it is told."""
        self.sent.clear()
        self.widget._handle_custom_msg(content, [])
        return self.sent

    @property
    def grid(self) -> Any:
        return self.shell.user_ns["grid"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[CellsWidget]:
    """The widgets that are made."""
    made: list[CellsWidget] = []

    class Recorded(CellsWidget):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            made.append(self)

    monkeypatch.setattr("nbengine.widgets.grid.cells_widget.CellsWidget", Recorded)
    return made


async def compared(
    shell: InteractiveShell, made: list[CellsWidget], number: int = 3, flags: str = ""
) -> Cells:
    shell.user_ns["words"] = [f"w{index}" for index in range(number)]
    (await run(shell, LINE.format(flags=flags))).raise_error()
    (widget,) = made
    return Cells(shell, widget)


async def test_rows_come_as_they_are_asked_for(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    cells = await compared(kernel_shell, made, 500)
    assert (cells.widget.num_rows, len(cells.widget.first_rows)) == (500, 40)
    (message,) = cells.ask({"kind": "rows", "rows": [499, 40]})
    assert [row["row"] for row in message["rows"]] == [499, 40]
    assert message["rows"][0]["labels"] == [("words", "w499")]
    assert [cell["answers"] for cell in message["rows"][0]["cells"]] == [["Hello world"]] * 2
    (message,) = cells.ask({"kind": "rows", "rows": list(range(500))})
    assert len(message["rows"]) == 200


async def test_thumbs_are_in_the_rows_and_come_back_with_the_kept_runs(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    cells = await compared(kernel_shell, made)
    assert "thumb" not in cells.grid.rows()[0]
    (message,) = cells.ask({"kind": "thumb", "position": 1, "thumb": 1})
    assert (message["kind"], message["position"], message["cell"]["thumb"]) == ("cell", 1, 1)
    cells.ask({"kind": "thumb", "position": 4, "thumb": -1})
    cells.ask({"kind": "thumb", "position": 5, "thumb": 1})
    cells.ask({"kind": "thumb", "position": 5, "thumb": 0})
    thumbs = [None, 1, None, None, -1, None]
    assert [row["thumb"] for row in cells.grid.rows()] == thumbs
    (await run(kernel_shell, LINE.format(flags=" --resume"))).raise_error()
    assert [row["thumb"] for row in kernel_shell.user_ns["grid"].rows()] == thumbs


async def test_what_is_said_of_a_resumed_answer_is_kept_with_its_run(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    await compared(kernel_shell, made)
    made.clear()
    cells = await compared(kernel_shell, made, flags=" --resume")
    cells.ask({"kind": "thumb", "position": 1, "thumb": -1})
    cells.ask({"kind": "pin", "position": 4, "pinned": True})
    kept = [(row["thumb"], row["pinned"]) for row in runs().rows()]
    assert kept == [(0, False), (-1, False), (0, False), (0, False), (0, True), (0, False)]
    made.clear()
    again = await compared(kernel_shell, made, flags=" --resume")
    shown = [cell for row in again.widget.first_rows for cell in row["cells"]]
    assert [(cell["thumb"], cell["pinned"]) for cell in shown] == kept


async def test_the_same_question_asked_twice_has_a_run_for_each_answer(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    kernel_shell.user_ns["words"] = ["w", "w"]
    (await run(kernel_shell, LINE.format(flags=""))).raise_error()
    cells = Cells(kernel_shell, made[0])
    cells.ask({"kind": "pin", "position": 2, "pinned": True})
    assert [row["pinned"] for row in runs().rows()] == [False, False, True, False]
    cells.ask({"kind": "again", "position": 2})
    await until(lambda: len(runs()) == 5)
    # The pin stays with the answer that had it.
    assert cells.grid.pinned == set()
    cells.ask({"kind": "thumb", "position": 2, "thumb": 1})
    kept = [(row["thumb"], row["pinned"]) for row in runs().rows()]
    assert kept == [(0, False), (0, False), (0, True), (0, False), (1, False)]


async def test_a_mark_without_a_run_is_no_mark_and_says_so(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    cells = await compared(kernel_shell, made)
    (await run(kernel_shell, "%runs clear --yes")).raise_error()
    (message,) = cells.ask({"kind": "pin", "position": 0, "pinned": True})
    assert "run must be the number of a kept run" in message["text"]
    assert cells.grid.pinned == set()


async def test_a_pin_keeps_the_run_of_the_cell_alone(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    cells = await compared(kernel_shell, made)
    cells.ask({"kind": "pin", "position": 2, "pinned": True})
    pinned = [row for row in runs().rows() if row["pinned"]]
    assert [(row["prompt"], row["temperature"]) for row in pinned] == [("w1", 0)]
    cells.ask({"kind": "pin", "position": 2, "pinned": False})
    assert not [row for row in runs().rows() if row["pinned"]]


async def test_one_cell_is_asked_again_and_loses_what_a_person_has_said_of_its_old_answer(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    cells = await compared(kernel_shell, made)
    cells.ask({"kind": "thumb", "position": 3, "thumb": 1})
    engine.words = ["Other"]
    cells.ask({"kind": "again", "position": 3})
    await until(lambda: cells.grid[3].finished and cells.sent[-1]["cell"]["answers"] == ["Other"])
    assert [result.text for result in cells.grid] == ["Hello world"] * 3 + ["Other"] + ["Hello world"] * 2
    assert cells.grid.rows()[3]["text"] == "Other"
    assert cells.grid.thumbs == {}
    assert engine.requests[-1][0]["prompt"] == "<user>w1"
    assert engine.requests[-1][1].temperature == 1


async def test_an_answer_that_was_asked_again_is_scored_and_the_means_follow(
    kernel_shell: InteractiveShell,
    engine: FakeClient,
    made: list[CellsWidget],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tables: list[ScoresWidget] = []

    class Recorded(ScoresWidget):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            tables.append(self)

    monkeypatch.setattr("nbengine.widgets.grid.widget.ScoresWidget", Recorded)
    kernel_shell.user_ns["size"] = lambda result, row: len(result.text)
    cells = await compared(kernel_shell, made, flags=" --score size")
    (table,) = tables
    assert (table.order["size"], table.differing) == ([11.0] * 3, [False] * 3)
    engine.words = ["Other"]
    cells.ask({"kind": "again", "position": 3})
    await until(lambda: table.differing == [False, True, False])
    assert [row["size"] for row in cells.grid.rows()] == [11, 11, 11, 5, 11, 11]
    assert table.order["size"] == [11.0, 8.0, 11.0]
    assert [row["cells"] for row in table.summary["rows"]] == [
        ["11 (11 to 11), n 3"],
        ["9 (0.395 to 17.6), n 3"],
    ]
    assert [row["cells"] for row in table.summary["differences"]["rows"]] == [
        ["-2 (-10.6 to 6.61), n 3"],
    ]
    assert cells.sent[-1]["cell"]["scores"] == [["size: 5", ""]]
    table.view.close()
    assert "9 (0.395 to 17.6)" in publisher(kernel_shell).outputs()[0]["text/plain"]


async def test_a_judge_of_pairs_compares_a_new_answer_with_those_of_other_settings(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    engine.turns = [["one"], ["two"], ["A"], ["B"]]
    cells = await compared(kernel_shell, made, 1, " --judge better --pairwise")
    assert [row["judge"] for row in cells.grid.rows()] == [1.0, 0.0]
    engine.turns = [["new"], ["A"], ["B"]]
    cells.ask({"kind": "again", "position": 1})
    await until(lambda: {message["position"] for message in cells.sent[-2:]} == {0, 1})
    assert [(row["text"], row["judge"]) for row in cells.grid.rows()] == [("one", 0.0), ("new", 1.0)]


async def test_what_the_engine_refuses_is_told_in_the_page(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    cells = await compared(kernel_shell, made)
    engine.refusal = RequestError("not now")
    assert cells.ask({"kind": "again", "position": 0}) == [{"kind": "notice", "text": "not now"}]
    assert cells.grid[0].text == "Hello world"
    kernel_shell.run_cell("%config NBEngine.keep_runs = False").raise_error()
    (message,) = cells.ask({"kind": "pin", "position": 0, "pinned": True})
    assert "no runs are kept" in message["text"]


async def test_two_cells_are_compared_word_by_word(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    engine.turns = [["a red house"], ["a blue house"]]
    cells = await compared(kernel_shell, made, 2)
    assert cells.ask({"kind": "diff", "first": 0, "second": 1}) == [
        {
            "kind": "diff",
            "parts": [["same", "a "], ["deleted", "red"], ["inserted", "blue"], ["same", " house"]],
        }
    ]


@pytest.mark.parametrize(
    "content",
    [
        None,
        {},
        {"kind": "thumb", "position": 99, "thumb": 1},
        {"kind": "thumb", "position": True, "thumb": 1},
        {"kind": "thumb", "position": 0, "thumb": 7},
        {"kind": "pin", "position": 0, "pinned": "yes"},
        {"kind": "diff", "first": 0, "second": -1},
        {"kind": "rows", "rows": "all"},
        {"kind": "drop", "position": 0},
    ],
)
async def test_what_no_script_says_changes_nothing(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget], content: object
) -> None:
    cells = await compared(kernel_shell, made)
    before, asked = cells.grid.rows(), len(engine.requests)
    assert cells.ask(content) == []
    assert (cells.grid.rows(), len(engine.requests)) == (before, asked)


@pytest.mark.parametrize("flags", ["--logprobs 2", "--diff", "-f markdown --diff"])
async def test_shaded_tokens_and_differences_stay_as_the_notebook_renders_them(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget], flags: str
) -> None:
    kernel_shell.user_ns["words"] = ["a"]
    (await run(kernel_shell, LINE.format(flags=f" {flags}"))).raise_error()
    assert made == []


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("-f markdown", "text/markdown"),
        ("-f markdown --logprobs 2", "text/markdown"),
        ("-f json", "text/html"),
        ("-f code --logprobs 2", "text/html"),
        ("--no-stream", "text/html"),
        ("-f markdown --no-stream", "text/markdown"),
    ],
)
async def test_cells_of_every_format_can_be_judged_beside_the_static_grid(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget], flags: str, kind: str
) -> None:
    cells = await compared(kernel_shell, made, 1, f" {flags}")
    view = "application/vnd.jupyter.widget-view+json"
    assert set(publisher(kernel_shell).outputs()[0]) == {"text/plain", kind, view}
    cells.ask({"kind": "thumb", "position": 1, "thumb": 1})
    assert [row["thumb"] for row in cells.grid.rows()] == [None, 1]


async def test_markdown_goes_to_the_script_without_live_html_and_the_answer_as_it_is(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    engine.words = ["# Title\n", "<img src=x>"]
    cells = await compared(kernel_shell, made, 1, " -f markdown")
    for cell in cells.widget.first_rows[0]["cells"]:
        assert (cell["code"], cell["answers"]) == (False, ["# Title\n<img src=x>"])
        assert cell["markdown"] == ["# Title\n&lt;img src=x>"]
    engine.words = ["- <b>"]
    cells.ask({"kind": "again", "position": 1})
    await until(lambda: cells.grid[1].finished and cells.sent[-1]["cell"]["answers"] == ["- <b>"])
    assert cells.sent[-1]["cell"]["markdown"] == ["- &lt;b>"]


async def test_code_is_marked_as_such(
    kernel_shell: InteractiveShell, engine: FakeClient, made: list[CellsWidget]
) -> None:
    engine.words = ["```python\nx = 1\n```"]
    cells = await compared(kernel_shell, made, 1, " -f code")
    cell = cells.widget.first_rows[0]["cells"][0]
    assert (cell["code"], cell["answers"], cell["markdown"]) == (True, ["x = 1"], [])
