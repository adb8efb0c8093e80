"""Stages of a start as they are shown."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import Progress
from nbengine.widgets.processes.progress import StartProgress
from tests.unit.magics.conftest import RecordingPublisher


def test_seconds_go_on_while_nothing_is_reported(kernel_shell: InteractiveShell) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    with StartProgress(kernel_shell, "starting", ParallelConfig()) as progress:
        progress.update(Progress("load", "big file", 0.25, seconds=41.9))
        publisher.wait_for("▸ load       42.")
        publisher.wait_for(" s   25%  big file")
        progress.update(Progress("load", "", 0.5, seconds=42.3))
        publisher.wait_for("50%  big file")
        progress.conclusion = "ready"
    (output,) = publisher.outputs()
    assert output["text/plain"].splitlines()[0] == "starting"
    assert output["text/plain"].splitlines()[1].startswith("  ✓ load       42.")
    assert "%" not in output["text/plain"]
    assert output["text/plain"].splitlines()[-1] == "ready"


def test_a_terminal_gets_a_line_a_stage(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> None:
    def start_and_fail() -> None:
        with StartProgress(shell, "starting", ParallelConfig()) as progress:
            progress.update(Progress("fetch", "98 MB", seconds=2.0))
            progress.update(Progress("fetch", "98 MB", seconds=3.0))
            progress.update(Progress("load"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_and_fail()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["starting", "  ✓ fetch       3.0 s  98 MB", "  ✗ load        0.0 s"]


def test_what_is_refused_before_its_first_stage_is_not_left_starting(kernel_shell: InteractiveShell) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    with pytest.raises(ZeroDivisionError), StartProgress(kernel_shell, "starting m", ParallelConfig()):
        raise ZeroDivisionError
    (output,) = publisher.outputs()
    assert output["text/plain"] == "starting m: not started"


def test_detail_of_a_stage_is_dead_html(kernel_shell: InteractiveShell) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    with StartProgress(kernel_shell, "starting <b>", ParallelConfig()) as progress:
        progress.update(Progress("load", "<script>"))
    html = publisher.outputs()[0]["text/html"]
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


def test_workers_have_a_line_each_in_a_notebook(kernel_shell: InteractiveShell) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    with StartProgress(kernel_shell, "starting", parallel) as progress:
        for worker in range(4):
            progress.update(Progress("load", "<b>weights", 0.42, rank=0, worker=worker))
        publisher.wait_for("TP1 PP1")
        progress.update(Progress("load", "", 1.0, rank=0, worker=3))
        publisher.wait_for("1 of 4 workers")
    (_, shown, _) = next(message for message in publisher.messages if "1 of 4" in message[1]["text/plain"])
    lines = shown["text/plain"].splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [
        ["▸", "TP0", "PP0"],
        ["▸", "TP1", "PP0"],
        ["▸", "TP0", "PP1"],
        ["✓", "TP1", "PP1"],
    ]
    assert "42%  <b>weights" in lines[2]
    assert "42%  &lt;b&gt;weights" in shown["text/html"]
    assert "<b>" not in shown["text/html"]


def test_a_terminal_gets_a_line_for_each_worker_that_is_done(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with StartProgress(shell, "starting", ParallelConfig(tensor_parallel_size=2)) as progress:
        progress.update(Progress("load", "weights", 0.4, rank=0, worker=0))
        progress.update(Progress("load", "weights", 1.0, seconds=1.0, rank=0, worker=1))
        assert capsys.readouterr().out == "starting\n  ✓ load        1.0 s  TP1\n"
        progress.update(Progress("load", "weights", 1.0, seconds=2.0, rank=0, worker=0))
        progress.update(Progress("ready"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "  ✓ load        2.0 s  TP0"
    assert lines[1].endswith("2 of 2 workers")
    assert lines[2].startswith("  ✓ ready")
