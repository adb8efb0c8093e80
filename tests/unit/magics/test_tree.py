"""`%engine tree`: text in a terminal, a picture in a notebook."""

from __future__ import annotations

import os

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.unit.magics.conftest import FakeClient, RecordingPublisher

Capture = pytest.CaptureFixture[str]


def test_a_terminal_gets_the_text(shell: InteractiveShell, engine: FakeClient, capsys: Capture) -> None:
    for line in ("%engine tree", "%engine tree random-tiny"):
        capsys.readouterr()
        shell.run_cell(line).raise_error()
        first, second, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("engine random-tiny: model random-tiny, TP 1 × PP 1")
        assert second.split()[:5] == ["frontend", "(this", "process)", "pid", str(os.getpid())]


def test_a_notebook_gets_the_picture_and_the_text(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    publisher = kernel_shell.display_pub
    assert isinstance(publisher, RecordingPublisher)
    publisher.messages.clear()
    kernel_shell.run_cell("%engine tree").raise_error()
    (output,) = publisher.outputs()
    assert set(output) == {"text/plain", "text/html", "image/svg+xml"}
    assert "<svg " in output["text/html"]
    assert "engine random-tiny" in output["text/plain"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%engine tree", "no engine is running here: `%engine start` starts one"),
        ("%engine tree other", "no engine is called 'other'; running: none"),
    ],
)
def test_without_an_engine_it_says_so(
    shell: InteractiveShell, capsys: Capture, line: str, message: str
) -> None:
    assert not shell.run_cell(line).success
    printed = capsys.readouterr()
    assert message in printed.err + printed.out
