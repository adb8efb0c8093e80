"""`%engine scale` and `waves`, against engines that only pretend."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Self

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import NBEngineError
from nbengine.runtime.connection import ConnectionInfo, connection_file
from nbengine.widgets.waves.timeline import RankSpan, Span, WaveTimeline
from tests.unit.magics.conftest import FakeBackend, FakeClient, RecordingPublisher

Capture = pytest.CaptureFixture[str]


def test_scaling_up_shows_what_starts_and_a_restart_keeps_the_number(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine scale --dp 3").raise_error()
    assert capsys.readouterr().out.splitlines()[:4] == [
        "scaling random-tiny from 1 to 3 engine cores",
        "  ✓ load        0.5 s  DP1",
        "  ✓ load        0.5 s  DP2",
        "  ✓ load        0.5 s  2 of 2 engine cores",
    ]
    shell.run_cell("%engine scale --dp 2").raise_error()
    first, last = capsys.readouterr().out.splitlines()
    assert first == "scaling random-tiny from 3 to 2 engine cores"
    assert "engine 'random-tiny' was scaled in" in last
    assert "2 engine cores on cpu float32, KV cache 128 blocks" in last
    shell.run_cell("%engine restart").raise_error()
    assert backend.clients["random-tiny"].config.parallel.data_parallel_size == 2


def size_in_config(shell: InteractiveShell, capsys: Capture) -> dict[str, object]:
    capsys.readouterr()
    shell.run_cell("%engine config --json").raise_error()
    found: dict[str, object] = json.loads(capsys.readouterr().out)["arguments"]["data_parallel_size"]
    return found


def test_config_restart_and_load_go_by_the_number_of_engine_cores_that_there_are(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient, capsys: Capture
) -> None:
    assert size_in_config(shell, capsys) == {"value": 1, "source": "default"}
    shell.run_cell("%engine scale --dp 3").raise_error()
    assert size_in_config(shell, capsys) == {"value": 3, "source": "given"}
    engine.scale_blocking(2)  # as if another notebook had asked for it
    assert size_in_config(shell, capsys) == {"value": 2, "source": "given"}
    shell.run_cell("%engine restart").raise_error()
    assert backend.started[-1] == {"model": "random-tiny", "data_parallel_size": 2}
    backend.clients["random-tiny"].scale_blocking(1)
    shell.run_cell("%engine load other").raise_error()
    assert backend.started[-1] == {"model": "other", "data_parallel_size": 1}


def test_an_engine_that_has_died_is_started_again_as_large_as_it_was_made_here(
    shell: InteractiveShell, backend: FakeBackend, engine: FakeClient
) -> None:
    shell.run_cell("%engine scale --dp 3").raise_error()
    connection_file(engine.name).unlink()
    shell.run_cell("%engine restart").raise_error()
    assert backend.started[-1]["data_parallel_size"] == 3


def test_scaling_to_what_there_is_does_nothing(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.answers["scale"] = AssertionError("asked")
    shell.run_cell("%engine scale random-tiny --dp 1").raise_error()
    assert capsys.readouterr().out == "engine 'random-tiny' has 1 engine core already\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%engine scale", "the following arguments are required: --dp"),
        ("%engine scale --dp 0", "data_parallel_size must be at least 1, got 0"),
        ("%engine scale --dp many", "invalid int value: 'many'"),
        ("%engine scale nobody --dp 2", "there is no engine 'nobody'"),
        ("%engine waves --seconds 0", "'0' is not a number of seconds from 0 to 3600"),
        ("%engine waves --seconds long", "'long' is not a number of seconds from 0 to 3600"),
        ("%engine waves nobody", "no engine is called 'nobody'"),
    ],
)
def test_a_mistake_is_one_line(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, line: str, message: str
) -> None:
    outcome = shell.run_cell(line)
    assert isinstance(outcome.error_in_exec, UsageError | NBEngineError)
    printed = capsys.readouterr()
    shown = printed.err or printed.out
    assert message in shown
    assert shown.count("\n") == 1


def test_what_cannot_be_scaled_says_why_in_one_line_and_interrupts_leave_it_going(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    engine.answers["scale"] = NBEngineError("engine random-tiny was not scaled: it is ending")
    assert isinstance(shell.run_cell("%engine scale --dp 2").error_in_exec, NBEngineError)
    printed = capsys.readouterr().out
    assert "NBEngineError: engine random-tiny was not scaled: it is ending" in printed
    assert "Traceback" not in printed
    engine.answers["scale"] = KeyboardInterrupt()
    assert isinstance(shell.run_cell("%engine scale --dp 2").error_in_exec, KeyboardInterrupt)
    assert "not waited for; the engine goes on with it" in capsys.readouterr().out


class FakeRecording:
    """Has recorded one second of two ranks."""

    def __init__(self, info: ConnectionInfo) -> None:
        ranks = {0: RankSpan(10, 0, 0, True, 2), 1: RankSpan(0, 10, 0, True, 0)}
        self.timeline = WaveTimeline(info.name, True, (Span(0.0, 1.0, ranks),))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbengine.magics.engines.parallel.WaveRecording", FakeRecording)


@pytest.mark.usefixtures("recorded")
def test_a_terminal_gets_the_waves_as_text_once(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("%engine waves --seconds 0.01").raise_error()
    printed = capsys.readouterr().out
    assert printed.count("engine random-tiny: 2 engine cores in lock step") == 1
    assert "░" in printed


@pytest.mark.usefixtures("recorded")
def test_a_notebook_gets_one_picture_that_is_replaced_while_it_goes_on(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    kernel_shell.run_cell("%engine waves --seconds 0.01").raise_error()
    (output,) = publisher.outputs()
    assert len(publisher.messages) >= 2
    assert set(output) == {"text/plain", "text/html", "image/svg+xml"}
    assert "<svg " in output["text/html"]
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("recorded")
def test_an_interrupt_ends_the_recording_and_shows_it(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nbengine.magics.engines.parallel.time.sleep", interrupt)
    shell.run_cell("%engine waves").raise_error()
    assert "2 engine cores in lock step" in capsys.readouterr().out
