"""`%dashboard` in a shell, on an engine whose coordinator is played."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, NotSupportedError
from nbengine.magics.extension import unload
from nbengine.metrics.trace import RequestAdded, RequestFinished, RequestTrace, StepPlanned
from nbengine.widgets.dashboard import widget as dashboard_module
from nbengine.widgets.dashboard.chrome_trace import EngineHistory
from nbengine.widgets.dashboard.open_dashboards import OPEN
from nbengine.widgets.dashboard.plain_view import PlainView
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.dashboard.widget import Dashboard, answer_at_once
from nbengine.widgets.following import feed as feed_module
from nbengine.widgets.following.feed import EngineFeed
from nbengine.widgets.idle import IdleClock
from tests.unit.widgets.frame_decoder import FrameDecoder
from tests.unit.widgets.publishing import DEADLINE, Publisher

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[2J\x07"


class Script:
    """The browser's end of a dashboard: it keeps what is sent, and reads the frames."""

    def __init__(self, dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dashboard = dashboard
        self.decoder = FrameDecoder()
        self.messages: list[dict[str, Any]] = []
        self.frames = 0
        self._changed = threading.Condition()
        monkeypatch.setattr(dashboard, "send", self._receive)

    def say(self, **content: object) -> None:
        self.dashboard._handle_custom_msg(content, [])

    def ask(self, **content: object) -> dict[str, Any]:
        """The answer to a question, which comes before anything else can happen."""
        self.say(**content)
        return self.messages[-1]

    def wait_for(self, condition: Callable[[FrameDecoder], bool]) -> None:
        with self._changed:
            found = self._changed.wait_for(lambda: self.frames > 0 and condition(self.decoder), DEADLINE)
        assert found, self.decoder.frame

    def _receive(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        with self._changed:
            if content["kind"] == "frame":
                self.decoder.take(content, buffers or [])
                self.frames += 1
            else:
                self.messages.append(content)
            self._changed.notify_all()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PUBLISH_INTERVAL", 0.02)
    monkeypatch.setattr(feed_module, "IDLE_INTERVAL", 0.02)
    monkeypatch.setattr(feed_module, "ALIVE_INTERVAL", 0.05)
    monkeypatch.setattr(dashboard_module, "FRAME_INTERVAL", 0.0)
    monkeypatch.setattr(dashboard_module, "BYTES_PER_SECOND", 1e9)
    monkeypatch.setattr(OPEN, "line", Throttle(0.0, 1e9, 0.0))
    monkeypatch.setattr(Dashboard, "_snapshots", Throttle(0.0, 1e9, 0.0))
    monkeypatch.setattr(dashboard_module, "QUIET", 0.0)


@pytest.fixture
def publisher(engine: Any) -> Iterator[Publisher]:
    publisher = Publisher(engine.connection)
    yield publisher
    EngineFeed.announce_end(engine.connection, "the test is over")
    wait_until(lambda: not any(thread.name.startswith("nbengine-feed") for thread in threading.enumerate()))
    publisher.close()


@pytest.fixture
def shown(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> tuple[Dashboard, Script]:
    """A dashboard whose script has been loaded."""
    kernel_shell.run_cell("%dashboard -o board").raise_error()
    dashboard = kernel_shell.user_ns["board"]
    script = Script(dashboard, monkeypatch)
    script.say(kind="hello")
    script.wait_for(lambda decoder: 0 in decoder.ranks)
    return dashboard, script


def begin(publisher: Publisher, name: str = "random-tiny-1", client: int = 1) -> None:
    """A request runs, with its prompt in two blocks of which one is full."""
    prompt = [72, 105, 33, 32, 72, 111]
    publisher.publish(
        RequestAdded(0, name, client, publisher.time, 6, 40, prompt),
        StepPlanned(0, publisher.time, [0], [6], [0], [0], [(0, [1, 2])]),
        num_running_reqs=1,
        num_free_blocks=6,
    )


def hostile_request() -> RequestTrace:
    return RequestTrace(RequestAdded(0, HOSTILE, 1, 1000.0, 6, 40, [60, 98, 62]), True, 6, 1, 0, 0, [1, 2])


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
    ((_, data, display_id),) = kernel_shell.display_pub.messages
    assert set(data) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert display_id
    assert "<script" not in data["text/html"]
    assert "&lt;script&gt;" in data["text/html"]
    board = kernel_shell.user_ns["board"]
    assert (board.height, board.snapshot, board.interrupt_path) == (500, {}, "")


def test_frames_follow_the_engine(shown: tuple[Dashboard, Script], publisher: Publisher) -> None:
    _, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    (row,) = script.decoder.requests
    assert (row["id"], row["own"], row["preview"]) == ("random-tiny-1", True, "Hi! Ho")
    assert len(script.decoder.ranks[0].steps) == 1
    frames = script.frames
    script.say(kind="alive")
    assert script.frames == frames + 1
    script.say(kind="hello")
    script.wait_for(lambda decoder: decoder.frame["reset"])


def test_a_silent_script_gets_nothing_until_it_is_heard_again(
    shown: tuple[Dashboard, Script], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard, script = shown
    monkeypatch.setattr(dashboard_module, "SILENCE", 0.0)
    wait_until(lambda: b"\x00trace" in publisher.topics)
    frames = script.frames
    begin(publisher)
    assert not dashboard.follows
    assert script.frames == frames
    monkeypatch.setattr(dashboard_module, "SILENCE", 15.0)
    script.say(kind="alive")
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)


def test_an_own_request_is_aborted_by_its_id(
    shown: tuple[Dashboard, Script], publisher: Publisher, engine: Any
) -> None:
    _, script = shown
    begin(publisher, "3_random-tiny-1")
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    answer = script.ask(kind="abort", rank=0, number=0)
    assert answer == {"kind": "aborted", "rank": 0, "number": 0, "error": None}
    assert engine.aborted == ["3_random-tiny-1"]


@pytest.mark.parametrize(("rank", "number"), [(0, 7), (1, 0), (None, 0), (0, "0"), ("<b>", [])], ids=repr)
def test_what_is_not_there_is_not_aborted(
    shown: tuple[Dashboard, Script], publisher: Publisher, engine: Any, rank: object, number: object
) -> None:
    _, script = shown
    begin(publisher)
    answer = script.ask(kind="abort", rank=rank, number=number)
    assert "has ended already, or never was" in answer["error"]
    assert engine.aborted == []


def test_a_request_of_another_client_is_refused(
    shown: tuple[Dashboard, Script], publisher: Publisher, engine: Any
) -> None:
    _, script = shown
    begin(publisher, "theirs", client=2)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    assert script.decoder.requests[0]["own"] is False
    answer = script.ask(kind="abort", rank=0, number=0)
    assert answer["error"] == (
        "request theirs is not this notebook's: only client 2 of the engine, which has sent it, can end it"
    )
    assert engine.aborted == []


def test_what_a_client_cannot_do_is_told(
    shown: tuple[Dashboard, Script], publisher: Publisher, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request_id: str) -> None:
        raise NotSupportedError(f"request {request_id}: interrupt the cell")

    monkeypatch.setattr(engine, "abort_soon", refuse)
    _, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    answer = script.ask(kind="abort", rank=0, number=0)
    assert answer["error"] == "request random-tiny-1: interrupt the cell"


def test_a_block_tells_its_holders_and_their_prefix(
    shown: tuple[Dashboard, Script], publisher: Publisher
) -> None:
    _, script = shown
    begin(publisher, HOSTILE)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    lines = script.ask(kind="block", rank=0, block=2)["lines"]
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>�[2J�"
    assert lines == [
        "block 2: held by a request",
        f"request {name}, its block 1: tokens 4 to 5 of 6",
        "holds: Ho",
        "after: Hi!",
    ]
    publisher.publish(RequestFinished(0, publisher.time, "stop"), num_running_reqs=0, num_free_blocks=8)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 0)
    lines = script.ask(kind="block", rank=0, block=2)["lines"]
    assert lines == ["block 2: free", f"last held by request {name}, as its block 1"]
    assert script.ask(kind="block", rank=0, block=5)["lines"] == ["block 5: free", "nobody has held it"]
    assert script.ask(kind="block", rank=0, block=99)["lines"] == ["there is no block 99"]


def test_the_trace_is_exported(shown: tuple[Dashboard, Script], publisher: Publisher, tmp_path: Path) -> None:
    dashboard, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    answer = script.ask(kind="export")
    assert answer["name"] == "random-tiny-trace.json"
    assert dashboard.export(tmp_path / "trace.json").read_text() == answer["text"]


def test_the_feed_goes_on_while_a_trace_is_written(
    shown: tuple[Dashboard, Script], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script = shown
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)

    def slow_trace(history: EngineHistory) -> str:
        publisher.publish(num_running_reqs=7)
        script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 7)
        return str(len(history.ranks[0].steps))

    monkeypatch.setattr(dashboard_module, "chrome_trace", slow_trace)
    assert script.ask(kind="export")["text"] == "1"


def test_dashboards_share_the_way_to_the_browser(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "BYTES_PER_SECOND", 100_000)
    monkeypatch.setattr(OPEN, "line", Throttle(0.0, 100_000, 0.0))
    scripts = []
    for number in range(3):
        kernel_shell.run_cell(f"%dashboard -o board{number}").raise_error()
        scripts.append(Script(kernel_shell.user_ns[f"board{number}"], monkeypatch))
    began = time.monotonic()
    for script in scripts:
        script.say(kind="hello")
    assert [script.frames for script in scripts] == [1, 0, 0]
    for script in scripts:
        script.wait_for(lambda decoder: 0 in decoder.ranks)
    # A frame is more than a thousand bytes.
    assert time.monotonic() - began > 2 * 0.01
    # What was not used meanwhile is for all of them at once.
    moments = iter([0.0])
    monkeypatch.setattr(OPEN, "line", Throttle(0.0, 100_000, 1.0, lambda: next(moments, 60.0)))
    frames = [script.frames for script in scripts]
    for script in scripts:
        script.dashboard._throttle = Throttle(0.0, 1e9, 0.0)
        script.say(kind="hello")
    assert [script.frames for script in scripts] == [count + 1 for count in frames]


def test_snapshots_come_one_after_the_other(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(Dashboard, "_snapshots", Throttle(0.0, 1000.0, 0.0, lambda: now))
    begin(publisher)
    boards = []
    for number in range(2):
        kernel_shell.run_cell(f"%dashboard -o board{number}").raise_error()
        boards.append(kernel_shell.user_ns[f"board{number}"])
        script = Script(boards[-1], monkeypatch)
        script.say(kind="hello")
        script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    with boards[0]._feed.state() as state:
        for board in boards:
            board._snapshot_due = 0.0
            board._renew_snapshot(state)
        assert [bool(board.snapshot) for board in boards] == [True, False]
        content = {name: value for name, value in boards[0].snapshot.items() if name != "buffers"}
        now = 0.5 * len(str(content)) / 1000
        boards[1]._renew_snapshot(state)
        assert not boards[1].snapshot
        now = 10.0 * len(str(content)) / 1000
        boards[1]._renew_snapshot(state)
        assert boards[1].snapshot


def test_what_a_script_should_not_say_changes_nothing(shown: tuple[Dashboard, Script]) -> None:
    dashboard, script = shown
    for content in ("text", None, {}, {"kind": "block"}, {"kind": "block", "rank": "0", "block": []}):
        dashboard._handle_custom_msg(content, [])
    assert script.messages == []


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
    (_, _, first), (is_update, data, display_id) = kernel_shell.display_pub.messages
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


def test_a_script_that_cannot_load_is_replaced_when_the_kernel_is_idle(
    kernel_shell: InteractiveShell, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_module, "LOADING_SECONDS", 0.1)
    kernel_shell.run_cell("%dashboard -o board\nimport time; time.sleep(0.3)").raise_error()
    messages = kernel_shell.display_pub.messages
    assert len(messages) == 1
    wait_until(lambda: len(messages) == 2)
    update, data, display_id = messages[1]
    assert update
    assert display_id == messages[0][2]
    view = "application/vnd.jupyter.widget-view+json"
    assert data[view]["model_id"] != messages[0][1][view]["model_id"]
    board = kernel_shell.user_ns["board"]
    begin(publisher)
    wait_until(lambda: "random-tiny-1" in board._plain._plain._requests.value)
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
    assert isinstance(board, PlainView)
    begin(publisher)
    wait_until(lambda: not board._plain._button.disabled)
    board._plain._button.click()
    assert engine.aborted == ["random-tiny-1"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--heigth 3", "unknown flag --heigth; did you mean --height?"),
        ("--height 10", "argument --height: '10' is not a number of pixels from 200 to 4000"),
        ("--watch soon", "argument --watch: 'soon' is not a number of seconds from 0.1 to 3600"),
        ("--plain --text", "--plain and --text are two forms; give one of them"),
        ("--text -o board", "-o NAME is for a widget, and this is text"),
        ("-o 1x", "argument -o: '1x' is not a name of a variable"),
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


def test_a_comm_answers_where_it_is_asked() -> None:
    class Comm:
        def _reply_subshell_for(self, data: object, default: str) -> str:
            return "the shell that has published last"

    comm = Comm()
    answer_at_once(comm)
    assert comm._reply_subshell_for is None
    older = object()
    answer_at_once(older)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
