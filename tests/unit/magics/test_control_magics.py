"""`%engine sleep`, `wake`, `pause`, `resume`, `reset` and `profile`: what they ask for, and the line that they answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, UtilityError
from nbengine.ipc.utilities import ProfileReport
from nbengine.magics.engines import patience
from nbengine.metrics.stats import EngineStats, SchedulerStats
from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]


def said(shell: InteractiveShell, line: str, capsys: Capture) -> str:
    """Run a line, check that it succeeds, and return what it prints."""
    capsys.readouterr()
    shell.run_cell(line).raise_error()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "call", "answer"),
    [
        (
            "sleep",
            ("sleep", 1, None, False),
            "sleeps: 0 B of memory came back; `%engine wake` or the next request wakes it",
        ),
        (
            "sleep --hold",
            ("sleep", 1, None, True),
            "sleeps: 0 B of memory came back; `%engine wake` wakes it",
        ),
        ("sleep --level 2 --mode keep", ("sleep", 2, "keep", False), "sleeps"),
        ("sleep random-tiny --mode wait", ("sleep", 1, "wait", False), "sleeps"),
        ("pause", ("pause_generation", "abort", True), "is paused until `%engine resume`"),
        ("pause --mode wait --keep-cache", ("pause_generation", "wait", False), "is paused"),
        ("resume", ("resume_generation",), "goes on"),
    ],
)
def test_each_asks_for_what_its_flags_say_and_answers_in_one_line(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, line: str, call: tuple, answer: str
) -> None:
    printed = said(shell, f"%engine {line}", capsys)
    assert printed.startswith(f"engine 'random-tiny' {answer}")
    assert printed.count("\n") == 1
    assert engine.utilities == [call]


@pytest.mark.parametrize(("asleep", "state"), [(False, "is awake"), (True, "still sleeps, in part")])
def test_wake_says_whether_all_is_back(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, asleep: bool, state: str
) -> None:
    engine.answers["is_sleeping"] = asleep
    assert said(shell, "%engine wake --tag kv_cache", capsys).startswith(
        f"engine 'random-tiny' {state} after "
    )
    assert engine.utilities[0] == ("wake_up", ["kv_cache"])


@pytest.mark.parametrize(("done", "answer"), [(True, "is empty"), (False, "is in use: requests run")])
def test_reset_says_whether_it_was_possible(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, done: bool, answer: str
) -> None:
    engine.answers["reset_prefix_cache"] = done
    assert answer in said(shell, "%engine reset --running", capsys)
    assert engine.utilities == [("reset_prefix_cache", True)]


def test_a_profile_starts_and_stops(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, tmp_path: Path
) -> None:
    printed = said(shell, f"%engine profile start --dir {tmp_path} --steps 7", capsys)
    assert (
        printed == "engine 'random-tiny' records its next 7 steps; `%engine profile stop` writes the trace\n"
    )
    assert engine.utilities == [("start_profile", str(tmp_path), 7)]
    engine.answers["stop_profile"] = ProfileReport(["/x/trace.json.gz"], 7, "operation  ms")
    assert said(shell, "%engine profile stop", capsys) == "7 steps in /x/trace.json.gz\noperation  ms\n"


def answer_once_told(engine: FakeClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let no utility, and no end of the engine, be answered before a line has been printed; return the lines."""
    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.0)
    said: list[str] = []
    told = threading.Event()
    submit, shutdown = engine.submit_utility, engine.shutdown

    def note(line: str) -> None:
        said.append(line)
        told.set()

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **options: Any) -> Future[Any]:
            assert told.wait(60), "nothing was said"
            found: Future[Any] = call(*args, **options)
            return found

        return wait

    monkeypatch.setattr(patience, "print_quietly", note)
    monkeypatch.setattr(engine, "submit_utility", late(submit))
    monkeypatch.setattr(engine, "shutdown", late(shutdown))
    return said


@pytest.mark.parametrize(
    ("line", "does"),
    [
        ("sleep --mode wait", "sleeps"),
        ("wake", "wakes up"),
        ("pause --mode wait", "pauses"),
        ("resume", "goes on"),
        ("reset", "forgets its prefix cache"),
        ("profile start", "begins to record"),
        ("profile stop", "writes its profile"),
        ("stop --drain", "ends"),
    ],
)
def test_each_says_that_it_waits_for_the_engine(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, line: str, does: str
) -> None:
    engine.answers["stop_profile"] = ProfileReport(["/x/trace.json.gz"], 7, "operation  ms")
    said = answer_once_told(engine, monkeypatch)
    shell.run_cell(f"%engine {line}").raise_error()
    assert said == [f"engine 'random-tiny' {does} as soon as it can: 2 requests run"]


def test_why_an_engine_takes_its_time_is_said_as_far_as_it_is_known(
    engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(patience, "print_quietly", said.append)

    def dead(timeout: float) -> tuple[EngineStats, list[int]]:
        raise EngineDeadError("it was killed")

    for stats_within in (
        lambda _: (EngineStats([SchedulerStats()]), []),
        lambda _: (EngineStats([]), [0]),
        dead,
    ):
        monkeypatch.setattr(engine, "stats_within", stats_within)
        patience._tell(engine, "sleeps", lambda: False)
    assert said == [
        "engine 'random-tiny' sleeps as soon as it can",
        "engine 'random-tiny' sleeps as soon as it can: it may be computing a long step",
    ]


def test_what_is_done_while_the_engine_is_asked_says_nothing_more(
    engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    asked, ended = threading.Event(), threading.Event()

    def slow(timeout: float) -> tuple[EngineStats, list[int]]:
        asked.set()
        assert ended.wait(60)
        return EngineStats([SchedulerStats()]), []

    monkeypatch.setattr(patience, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(patience, "print_quietly", said.append)
    monkeypatch.setattr(engine, "stats_within", slow)
    with patience.told_if_slow(engine, "sleeps"):
        (timer,) = [each for each in threading.enumerate() if each.name == "nbengine-patience"]
        assert asked.wait(60)
    ended.set()
    timer.join(60)
    assert said == []


def test_what_is_done_at_once_says_nothing_more(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            timers.append(self)
            super().start()

    monkeypatch.setattr(patience.threading, "Timer", Timer)
    shell.run_cell("%engine pause").raise_error()
    (timer,) = timers
    timer.join(60)
    assert timer.finished.is_set()
    assert engine.utilities == [("pause_generation", "abort", True)]


def test_without_a_directory_it_goes_below_the_notebooks(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shell.run_cell("%engine profile start").raise_error()
    assert engine.utilities == [("start_profile", str(tmp_path / "nbengine-profiles"), 200)]


def test_what_the_engine_refuses_is_an_error_without_a_traceback(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.answers["sleep"] = UtilityError("2 unfinished requests are not paused")
    capsys.readouterr()
    result = shell.run_cell("%engine sleep")
    assert isinstance(result.error_in_exec, UtilityError)
    assert "Traceback" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["sleep --level 3", "pause --mode slowly", "wake --tag kv", "profile", "profile on"]
)
def test_wrong_words_are_usage_errors(shell: InteractiveShell, engine: FakeClient, line: str) -> None:
    assert isinstance(shell.run_cell(f"%engine {line}").error_in_exec, UsageError)
    assert engine.utilities == []


def test_status_says_what_holds_requests_back(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    assert "2 running, 1 waiting\n" in said(shell, "%engine status", capsys)
    engine.stats.is_paused, engine.stats.sleep_level = True, 2
    status = said(shell, "%engine status", capsys)
    assert "1 waiting (paused: `%engine resume` goes on; asleep, level 2: `%engine wake` wakes it)" in status


@pytest.mark.parametrize("command", ["sleep", "wake", "pause", "resume", "reset", "profile"])
def test_every_command_has_help(shell: InteractiveShell, capsys: Capture, command: str) -> None:
    assert f"%engine {command}" in said(shell, "%engine help", capsys) or command in ("wake", "resume")
    assert said(shell, f"%engine help {command}", capsys).startswith(f"usage: %engine {command}")
