"""A dashboard and its script in the browser exchange messages, and nonsense harms neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineStalledError, NotSupportedError
from nbengine.metrics.history import HistoryRow, MetricsHistory
from nbengine.metrics.trace import RequestAdded, RequestFinished, StepPlanned
from nbengine.widgets.dashboard import widget as dashboard_module
from nbengine.widgets.dashboard.chrome_trace import EngineHistory
from nbengine.widgets.dashboard.throttle import Throttle
from nbengine.widgets.dashboard.widget import Dashboard, answer_at_once
from tests.unit.magics.dashboard.rig import HOSTILE, Script, begin, wait_until
from tests.unit.widgets.dashboards import START
from tests.unit.widgets.publishing import Publisher


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


def test_a_script_out_of_sight_misses_nothing_and_gets_it_in_fewer_frames(
    shown: tuple[Dashboard, Script], publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard, script = shown
    script.say(kind="alive", visible=False)
    # A hidden page may say nothing for a minute.
    monkeypatch.setattr(dashboard_module, "SILENCE", 0.0)
    assert dashboard.follows
    monkeypatch.setattr(dashboard_module, "HIDDEN_INTERVAL", 1e9)
    frames = script.frames
    begin(publisher)
    for count in range(2, 40):
        publisher.publish(num_waiting_reqs=count)
    wait_until(lambda: num_waiting(dashboard) == 39)
    assert script.frames == frames
    monkeypatch.setattr(dashboard_module, "SILENCE", 15.0)
    script.say(kind="alive", visible=True)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_waiting"] == 39)
    assert len(script.decoder.ranks[0].steps) == 1
    assert script.decoder.ranks[0].cuts == []


def num_waiting(dashboard: Dashboard) -> int:
    with dashboard._feed.state() as state:
        return sum(engine.num_waiting_reqs for engine in state.stats.engines)


def test_the_hosts_history_is_answered_and_so_is_why_there_is_none(
    shown: tuple[Dashboard, Script], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script = shown
    rows = [
        HistoryRow(0, 100, 1, START, generation_tokens=30, running=2, running_after=0, waiting_after=0,
                   kv_usage_after=0.0),
        HistoryRow(0, 120, 1, START + 20, generation_tokens=10, ttft_p95=0.5),
    ]  # fmt: skip
    asked: list[str] = []

    def read(last: str) -> MetricsHistory:
        asked.append(last)
        if last == "1d":
            raise EngineStalledError("no history within 30 s")
        return MetricsHistory(rows, 0.0, 125.0)

    monkeypatch.setattr(engine, "history", read, raising=False)
    script.say(kind="history", last="1w")
    script.say(kind="history", last="1h")
    wait_until(lambda: bool(script.messages))
    (found,) = script.messages
    assert (found["kind"], found["last"], found["error"]) == ("history", "1h", None)
    assert (found["begin"], found["end"]) == (START, START + 25)
    (rank,) = found["ranks"]
    assert rank["seconds"] == 1.0
    # What the script's tiles are made of.
    tiles = {
        "tokens_per_second",
        "prompt_tokens_per_second",
        "kv_usage",
        "prefix_cache_queries",
        "prefix_cache_hits",
    }
    assert tiles | {f"{name}_p{part}" for name in ("ttft", "itl") for part in (50, 95, 99)} <= rank.keys()
    assert rank["tokens_per_second"][:2] == [30, 0]
    assert rank["tokens_per_second"][20] == 10
    assert rank["ttft_p95"][20] == 0.5
    # Nothing is known after the last row.
    assert rank["gap"] == [0] * 21 + [1] * 4
    assert rank["running"][21:] == [None] * 4
    script.say(kind="history", last="1d")
    wait_until(lambda: len(script.messages) == 2)
    assert script.messages[1]["error"] == "no history within 30 s"
    assert script.messages[1]["ranks"] == []
    assert asked == ["1h", "1d"]


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
    assert "has ended already, or never existed" in answer["error"]
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


def test_an_engine_that_is_held_back_is_let_go_on(shown: tuple[Dashboard, Script], engine: Any) -> None:
    _, script = shown
    assert script.ask(kind="go_on") == {"kind": "goes_on", "error": None}
    assert engine.calls == ["go on"]


def test_a_client_that_cannot_let_its_engine_go_on_says_so(
    shown: tuple[Dashboard, Script], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise NotSupportedError("its own code does that")

    monkeypatch.setattr(engine, "go_on_soon", refuse)
    _, script = shown
    assert script.ask(kind="go_on") == {"kind": "goes_on", "error": "its own code does that"}


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
    begin(publisher)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    lines = script.ask(kind="block", rank=0, block=2)["lines"]
    assert lines == [
        "block 2: held by a request",
        "request #0 Hi! Ho, its block 1: tokens 4 to 5 of 6",
        "holds: Ho",
        "after: Hi!",
    ]
    publisher.publish(RequestFinished(0, publisher.time, "stop"), num_running_reqs=0, num_free_blocks=8)
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 0)
    lines = script.ask(kind="block", rank=0, block=2)["lines"]
    assert lines == ["block 2: free", "last held by request #0 Hi! Ho, as its block 1"]
    assert script.ask(kind="block", rank=0, block=5)["lines"] == ["block 5: free", "nobody has held it"]
    assert script.ask(kind="block", rank=0, block=99)["lines"] == ["there is no block 99"]
    # Where its words are not known, a request has its id.
    publisher.publish(
        RequestAdded(1, HOSTILE, 1, publisher.time, 6, 40, []),
        StepPlanned(1, publisher.time, [1], [6], [0], [1], [(1, [3, 4])]),
        num_running_reqs=1,
        num_free_blocks=6,
    )
    script.wait_for(lambda decoder: decoder.ranks[0].info["num_running"] == 1)
    name = "</script><script>alert(1)</script><img src=x onerror=alert(2)>�[2J�"
    assert script.ask(kind="block", rank=0, block=4)["lines"] == [
        "block 4: held by a request",
        f"request #1 {name}, its block 1: tokens 4 to 5 of 6",
    ]


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
    now = [0.0]
    monkeypatch.setattr(dashboard_module, "LINE", Throttle(0.0, 100_000, 0.0, lambda: now[0]))
    scripts = []
    for number in range(3):
        kernel_shell.run_cell(f"%dashboard -o board{number}").raise_error()
        scripts.append(Script(kernel_shell.user_ns[f"board{number}"], monkeypatch))
    for script in scripts:
        script.say(kind="hello")
    assert [script.frames for script in scripts] == [1, 0, 0]
    for count in (2, 3):
        # A frame is more than a thousand bytes.
        now[0] += 0.01
        assert not dashboard_module.LINE.is_due
        now[0] += 10.0
        wait_until(lambda count=count: sum(script.frames for script in scripts) == count)
    for script in scripts:
        script.wait_for(lambda decoder: 0 in decoder.ranks)
    # What was not used meanwhile is for all of them at once.
    moments = iter([0.0])
    monkeypatch.setattr(dashboard_module, "LINE", Throttle(0.0, 100_000, 1.0, lambda: next(moments, 60.0)))
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


def test_a_comm_answers_where_it_is_asked() -> None:
    class Comm:
        def _reply_subshell_for(self, data: object, default: str) -> str:
            return "the shell that has published last"

    comm = Comm()
    answer_at_once(comm)
    assert comm._reply_subshell_for is None
    older = object()
    answer_at_once(older)
