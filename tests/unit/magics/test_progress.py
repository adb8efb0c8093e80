"""Stages of a start as they are shown."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.ipc.messages import Progress
from nbengine.widgets.progress import StartProgress
from tests.unit.magics.conftest import RecordingPublisher


def test_seconds_go_on_while_nothing_is_reported(kernel_shell: InteractiveShell) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    with StartProgress(kernel_shell, "starting") as progress:
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
        with StartProgress(shell, "starting") as progress:
            progress.update(Progress("fetch", "98 MB", seconds=2.0))
            progress.update(Progress("fetch", "98 MB", seconds=3.0))
            progress.update(Progress("load"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        start_and_fail()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["starting", "  ✓ fetch       3.0 s  98 MB", "  ✗ load        0.0 s"]


def test_detail_of_a_stage_is_dead_html(kernel_shell: InteractiveShell) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    with StartProgress(kernel_shell, "starting <b>") as progress:
        progress.update(Progress("load", "<script>"))
    html = publisher.outputs()[0]["text/html"]
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
