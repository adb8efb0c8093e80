"""Before a request is sent: an engine that sleeps is woken, one that is kept asleep refuses, a paused one says so."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import UtilityError
from nbengine.magics.generation.result import GenerationHandle
from nbengine.metrics.stats import EngineStats, SchedulerStats
from tests.unit.magics.conftest import FakeBackend, FakeClient

Capture = pytest.CaptureFixture[str]
ASKS = ["%%generate -o answer\nhello\n", "%%generate --temperature 0,1\nhello\n", "%%chat\nhello\n"]


def refusal(shell: InteractiveShell, code: str, capsys: Capture) -> str:
    capsys.readouterr()
    assert isinstance(shell.run_cell(code).error_in_exec, UsageError)
    return capsys.readouterr().err


@pytest.mark.parametrize("ask", ASKS)
def test_a_request_wakes_a_sleeping_engine_and_says_so(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, ask: str
) -> None:
    engine.engine_stats = [SchedulerStats(), SchedulerStats(engine_index=1, sleep_level=2)]
    shell.run_cell(ask).raise_error()
    assert engine.utilities == [("wake_up", None)]
    said = capsys.readouterr().out
    assert "engine 'random-tiny' sleeps and is woken" in said
    assert "engine 'random-tiny' is awake after" in said
    assert engine.requests


def test_an_engine_that_gets_no_time_to_say_that_it_sleeps_is_asked_again(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = EngineStats([SchedulerStats(sleep_level=1)])
    answers = iter([(EngineStats([]), [0]), (asleep, [])])
    monkeypatch.setattr(engine, "stats_within", lambda timeout: next(answers))
    shell.run_cell(ASKS[0]).raise_error()
    assert engine.utilities == [("wake_up", None)]
    assert engine.requests


@pytest.mark.parametrize("ask", ASKS)
def test_an_engine_that_is_kept_asleep_is_left_asleep(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, ask: str
) -> None:
    engine.engine_stats = [SchedulerStats(sleep_level=1, is_kept_asleep=True)]
    assert "`%engine wake random-tiny` wakes it" in refusal(shell, ask, capsys)
    assert engine.utilities == []
    assert engine.requests == []


@pytest.mark.parametrize("ask", ["%generate -t 9 hi", "%generate -t 9 --seed 1,2 hi", "%chat -t 9 hi"])
def test_a_line_that_is_refused_wakes_nothing(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, ask: str
) -> None:
    engine.engine_stats = [SchedulerStats(sleep_level=1)]
    assert "the engine cores of engine 'random-tiny' have the ranks 0" in refusal(shell, ask, capsys)
    assert engine.utilities == []


def test_one_that_does_not_wake_up_says_why(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.engine_stats = [SchedulerStats(sleep_level=1)]
    engine.answers["wake_up"] = UtilityError("there is not enough memory")
    assert isinstance(shell.run_cell(ASKS[0]).error_in_exec, UtilityError)
    assert engine.requests == []


def test_of_several_engines_none_is_woken_if_one_refuses(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend, capsys: Capture
) -> None:
    shell.run_cell("%engine start random-tiny --name second").raise_error()
    engine.engine_stats = [SchedulerStats(sleep_level=1)]
    backend.clients["second"].engine_stats = [SchedulerStats(sleep_level=1, is_kept_asleep=True)]
    assert "engine 'second' is kept asleep" in refusal(
        shell, "%%generate --engine random-tiny,second\nhi\n", capsys
    )
    assert engine.utilities == []


@pytest.mark.parametrize("ask", ASKS)
def test_where_no_other_cell_could_resume_it_a_paused_engine_is_an_error(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, ask: str
) -> None:
    engine.engine_stats = [SchedulerStats(is_paused=True)]
    assert "engine 'random-tiny' is paused: `%engine resume random-tiny` first" in refusal(shell, ask, capsys)
    assert engine.requests == []


def test_in_a_notebook_the_answer_of_a_paused_engine_comes_when_the_cell_has_ended(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.words = None
    engine.engine_stats = [SchedulerStats(is_paused=True)]
    kernel_shell.run_cell(ASKS[0]).raise_error()
    assert "is paused: the answer comes after `%engine resume random-tiny`" in capsys.readouterr().out
    handle = kernel_shell.user_ns["answer"]
    assert isinstance(handle, GenerationHandle)
    engine.emit("done", "stop")
    assert handle.result().text == "done"


@pytest.mark.parametrize("ask", ["%%generate --diff\nhello\n", "%%generate --diff --seed 1,2\nhello\n"])
def test_a_cell_that_shows_what_differs_needs_its_answer_so_that_a_pause_is_an_error(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: Capture, ask: str
) -> None:
    engine.engine_stats = [SchedulerStats(is_paused=True)]
    said = refusal(kernel_shell, ask, capsys)
    assert "engine 'random-tiny' is paused: `%engine resume random-tiny` first" in said
    assert engine.requests == []


def test_engine_cores_that_are_busy_with_a_step_are_awake(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.silent = [0]
    shell.run_cell(ASKS[0]).raise_error()
    assert engine.utilities == []
    assert len(engine.requests) == 1


def test_one_engine_core_that_answers_is_enough(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([(EngineStats([SchedulerStats()]), [1])])
    monkeypatch.setattr(engine, "stats_within", lambda timeout: next(answers))
    shell.run_cell(ASKS[0]).raise_error()
    assert engine.utilities == []
    assert len(engine.requests) == 1
