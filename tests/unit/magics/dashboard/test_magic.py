"""`%dashboard` in a shell: what is shown, replaced and explained."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError
from nbengine.magics.extension import unload
from nbengine.widgets.dashboard import widget as dashboard_module
from nbengine.widgets.dashboard.plain import PlainDashboard
from nbengine.widgets.dashboard.widget import Dashboard
from nbengine.widgets.following.feed import EngineFeed
from nbengine.widgets.idle import IdleClock
from tests.unit.magics.dashboard.rig import Script, begin, hostile_request, wait_until
from tests.unit.widgets.frame_decoder import FrameDecoder
from tests.unit.widgets.publishing import Publisher


def test_a_terminal_gets_text_once(
    shell: InteractiveShell, publisher: Publisher, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher.requests = [hostile_request()]
    shell.run_cell("%dashboard").raise_error()
    printed = capsys.readouterr().out
    assert "random-tiny" in printed
    assert "</script><script>a" in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed
    assert not EngineFeed._feeds


def test_watching_in_a_terminal_ends_with_the_engine(
    shell: InteractiveShell, engine: Any, publisher: Publisher, capsys: pytest.CaptureFixture[str]
) -> None:
    timer = threading.Timer(0.3, lambda: setattr(engine, "death", EngineDeadError("out of memory")))
    timer.start()
    shell.run_cell("%dashboard --watch 0.1").raise_error()
    timer.join()
    printed = capsys.readouterr().out
    assert printed.count("requests") > 1
    assert "out of memory" in printed


def test_the_widget_has_static_forms_beside_it(kernel_shell: InteractiveShell, publisher: Publisher) -> None:
    publisher.requests = [hostile_request()]
    kernel_shell.run_cell("%dashboard --height 500 -o board").raise_error()
    (_, widget, display_id), (_, data, still_id) = kernel_shell.display_pub.messages
    assert set(widget) == {"application/vnd.jupyter.widget-view+json", "text/plain"}
    assert set(data) == {"text/html", "text/plain"}
    assert data["text/html"].startswith('<div class="nbe-still">')
    assert display_id != still_id
    assert "<script" not in data["text/html"]
    assert "&lt;script&gt;" in data["text/html"]
    board = kernel_shell.user_ns["board"]
    assert (board.height, board.snapshot, board.interrupt_path) == (500, {}, "")


def test_the_snapshot_is_a_frame_that_stands_by_itself(
    shown: tuple[Dashboard, Script], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    import base64

    dashboard, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    assert dashboard.snapshot == {}
    dashboard._snapshot_due = 0.0
    publisher.publish(num_waiting_reqs=3)
    wait_until(lambda: bool(dashboard.snapshot))
    first = dashboard.snapshot
    assert first["reset"] is True
    decoder = FrameDecoder()
    decoder.take(first, [base64.b64decode(buffer) for buffer in first["buffers"]])
    assert decoder.ranks[0].words == script.decoder.ranks[0].words
    publisher.publish(num_waiting_reqs=4)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_waiting"] == 4)
    assert dashboard.snapshot is first
    dashboard.close()
    assert dashboard.snapshot["ranks"][0]["num_waiting"] == 4


def test_closing_puts_a_picture_in_its_place(
    kernel_shell: InteractiveShell,
    shown: tuple[Dashboard, Script],
    publisher: Publisher,
    capsys: pytest.CaptureFixture[str],
) -> None:
    dashboard, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    kernel_shell.run_cell("%dashboard --close").raise_error()
    assert "closed 1 dashboard" in capsys.readouterr().out
    (_, _, first), (_, _, still), *_, cleared, (is_update, data, display_id) = (
        kernel_shell.display_pub.messages
    )
    assert cleared == (True, {"text/html": "<div hidden></div>", "text/plain": ""}, still)
    assert (is_update, display_id) == (True, first)
    assert set(data) == {"text/html", "text/plain"}
    assert "running" in data["text/plain"]
    assert dashboard.is_closed
    assert dashboard.comm is None
    dashboard.close()
    kernel_shell.run_cell("board").raise_error()
    assert kernel_shell.display_pub.messages[-1][1] == data


@pytest.mark.parametrize("form", ["", "--plain"])
def test_the_end_of_the_engine_is_shown_before_the_cell_ends(
    kernel_shell: InteractiveShell, publisher: Publisher, form: str
) -> None:
    kernel_shell.run_cell(f"%dashboard {form} -o board").raise_error()
    kernel_shell.run_cell("%engine stop").raise_error()
    update, data, _ = kernel_shell.display_pub.messages[-1]
    assert update
    assert set(data) == {"text/html", "text/plain"}
    assert "the engine was stopped" in data["text/plain"]
    assert kernel_shell.user_ns["board"].is_closed


def test_a_script_keeps_an_engine_that_has_ended(
    kernel_shell: InteractiveShell, shown: tuple[Dashboard, Script], publisher: Publisher
) -> None:
    dashboard, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    kernel_shell.run_cell("%engine stop").raise_error()
    assert script.decoder.frame["engine"]["state"] == "ended"
    assert script.decoder.frame["engine"]["note"] == "the engine was stopped"
    assert len(script.decoder.ranks[0].steps) == 1
    _, still, _ = kernel_shell.display_pub.messages[-1]
    assert "the engine was stopped" in still["text/html"]
    assert dashboard.snapshot["engine"]["state"] == "ended"
    # A page that is loaded again gets all of it, and the file can be had.
    script.say(kind="hello")
    assert script.decoder.frame["engine"]["state"] == "ended"
    assert len(script.decoder.ranks[0].steps) == 1
    assert "random-tiny-1" in script.ask(kind="export")["text"]
    assert "has ended" in script.ask(kind="abort", rank=0, number=0)["error"]
    # Closing puts the picture in its place.
    kernel_shell.run_cell("%dashboard --close").raise_error()
    _, picture, first = kernel_shell.display_pub.messages[-1]
    assert first == kernel_shell.display_pub.messages[0][2]
    assert "the engine was stopped" in picture["text/plain"]
    assert dashboard.is_closed


def test_a_script_that_cannot_load_is_replaced_when_the_kernel_is_idle(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "LOADING_SECONDS", 0.1)
    messages = kernel_shell.display_pub.messages
    kernel_shell.user_ns["messages"] = messages
    cell = "%dashboard -o board\nimport time; time.sleep(0.3); num_shown = len(messages)"
    kernel_shell.run_cell(cell).raise_error()
    assert kernel_shell.user_ns["num_shown"] == 2
    wait_until(lambda: len(messages) == 4)
    update, data, display_id = messages[3]
    assert update
    assert display_id == messages[0][2]
    view = "application/vnd.jupyter.widget-view+json"
    assert data[view]["model_id"] != messages[0][1][view]["model_id"]
    board = kernel_shell.user_ns["board"]
    begin(publisher)
    wait_until(lambda: "random-tiny-1" in board._plain._requests.value)
    kernel_shell.run_cell("%dashboard --close").raise_error()
    assert "random-tiny-1" in messages[-1][1]["text/plain"]
    assert view not in messages[-1][1]


def test_a_script_that_was_heard_is_not_replaced(
    shown: tuple[Dashboard, Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard, script = shown
    monkeypatch.setattr(dashboard_module, "LOADING_SECONDS", -1.0)
    script.say(kind="alive")
    frames = script.frames
    script.say(kind="alive")
    assert script.frames == frames + 1
    assert not dashboard._must_fall_back
    assert not dashboard.is_closed


def test_the_plain_widget_can_abort(
    kernel_shell: InteractiveShell, publisher: Publisher, engine: Any
) -> None:
    kernel_shell.run_cell("%config NBEngine.dashboard = 'plain'\n%dashboard -o board").raise_error()
    board = kernel_shell.user_ns["board"]
    assert isinstance(board, PlainDashboard)
    begin(publisher)
    wait_until(lambda: not board._button.disabled)
    board._button.click()
    assert engine.aborted == ["random-tiny-1"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--heigth 3", "unknown flag --heigth; did you mean --height?"),
        ("--height 10", "argument --height: '10' is not a number of pixels from 200 to 4000"),
        ("--watch soon", "argument --watch: 'soon' is not a number of seconds from 0.1 to 3600"),
        ("--plain --text", "--plain and --text are two forms; give one of them"),
        ("--text -o board", "-o NAME is for a widget, and this is text"),
        ("--text --side", "--side is for a widget, and this is text"),
        ("-o 1x", "argument -o: '1x' is not a variable name"),
        ("nowhere", "no engine is called 'nowhere'; running: random-tiny"),
    ],
)
def test_a_wrong_line_is_explained(
    kernel_shell: InteractiveShell,
    engine: Any,
    capsys: pytest.CaptureFixture[str],
    line: str,
    complaint: str,
) -> None:
    assert not kernel_shell.run_cell(f"%dashboard {line}").success
    assert f"UsageError: %dashboard: {complaint}" in capsys.readouterr().err


def test_it_opens_beside_the_notebook(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Sidecar:
        def __init__(self, title: str, anchor: str) -> None:
            events.append(f"{title}, {anchor}")

        def __enter__(self) -> None:
            events.append(f"enter {len(kernel_shell.display_pub.messages)}")

        def __exit__(self, *exception: object) -> None:
            events.append(f"exit {len(kernel_shell.display_pub.messages)}")

        def close(self) -> None:
            events.append("close")

    monkeypatch.setitem(sys.modules, "sidecar", SimpleNamespace(Sidecar=Sidecar))
    kernel_shell.run_cell("%dashboard --side -o board").raise_error()
    assert events == ["engine random-tiny, split-right", "enter 0", "exit 2"]
    kernel_shell.run_cell("%dashboard --close").raise_error()
    assert events[3:] == ["close"]
    assert kernel_shell.user_ns["board"].is_closed


def test_without_sidecar_it_says_what_to_install(
    kernel_shell: InteractiveShell,
    publisher: Publisher,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "sidecar", None)
    kernel_shell.run_cell("%dashboard --side")
    assert "pip install 'nbengine[side]'" in "".join(capsys.readouterr())
    assert kernel_shell.display_pub.messages == []


def test_without_an_engine_it_says_what_to_do(
    kernel_shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_shell.run_cell("%dashboard")
    assert "no engine is running here: `%engine start` starts one" in capsys.readouterr().err
    kernel_shell.run_cell("%dashboard -h").raise_error()
    assert "--height" in capsys.readouterr().out


def test_unloading_closes_dashboards_and_leaves_no_hook(
    kernel_shell: InteractiveShell, shown: tuple[Dashboard, Script]
) -> None:
    dashboard, _ = shown
    unload(kernel_shell)
    assert dashboard.is_closed
    assert kernel_shell not in IdleClock._clocks
    hooks = kernel_shell.events.callbacks
    assert not any(
        isinstance(getattr(hook, "__self__", None), IdleClock) for hooks in hooks.values() for hook in hooks
    )
