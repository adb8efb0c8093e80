"""A start says how far it is: a line in a terminal, the stages in a notebook's cell."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM
from nbengine.config import EngineConfig, ParallelConfig
from nbengine.frontend.llm_engine import LLMEngine
from nbengine.frontend.progress_line import progress_line, start_progress
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.progress import ProgressCallback
from nbengine.widgets.processes.progress import StartProgress

STEPS = [
    Progress("load"),
    Progress("load", "reading layers", 0.25),
    Progress("load", "reading layers", 0.251),
    Progress("kv", "\x1b[2J" + "x" * 200),
]


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_changes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 24)))
    with progress_line("starting tiny:") as show:
        assert show is not None
        for step in STEPS:
            show(step)
    begin, *lines = sys.stderr.getvalue().split("\r\x1b[K")  # type: ignore[attr-defined]
    assert begin == ""
    assert lines[:2] == ["starting tiny: load", "starting tiny: reading layers 25%"]
    assert lines[2] == ("starting tiny: \ufffd[2J" + "x" * 200)[:39]
    assert lines[3:] == [""]


def test_a_long_path_leaves_room_for_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((41, 24)))
    with progress_line("starting /home/somebody/models/model.gguf:") as show:
        assert show is not None
        show(Progress("load", "reading layers", 0.25))
        show(Progress("load", "x" * 200))
    _, *lines = sys.stderr.getvalue().split("\r\x1b[K")  # type: ignore[attr-defined]
    assert lines == ["starting /…odel.gguf: reading layers 25%", "startin…l.gguf: " + "x" * 24, ""]


def test_an_error_removes_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with progress_line("starting tiny:") as show:
            assert show is not None
            show(STEPS[0])
            raise ValueError("no")

    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="no"):
        fail()
    assert sys.stderr.getvalue().endswith("load\r\x1b[K")  # type: ignore[attr-defined]


@pytest.mark.parametrize("stderr", [io.StringIO, lambda: None])
def test_elsewhere_nobody_listens(stderr: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())  # type: ignore[operator]
    with progress_line("starting tiny:") as show:
        assert show is None
    if sys.stderr is not None:
        assert not sys.stderr.getvalue()  # type: ignore[attr-defined]


def test_where_it_is_asked_for_every_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_line("tiny:", everywhere=True) as show:
        assert show is not None
        for step in STEPS[:3]:
            show(step)
    assert capsys.readouterr().err == "tiny: load\ntiny: reading layers 25%\n"


class Cell:
    """A kernel's shell, and the last output of its cell."""

    kernel = object()

    def __init__(self) -> None:
        self.display_pub = self
        self.text = ""

    def publish(self, data: dict[str, str], **_: object) -> None:
        self.text = data["text/plain"]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    # What shows the stages needs the real package, and is imported before another one takes its name.
    assert StartProgress.__module__ in sys.modules
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: cell))
    return cell


def report(progress: ProgressCallback | None) -> None:
    assert progress is not None
    progress(Progress("load", "reading layers", 1.0, 2.0))


def start_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: LLMEngine, config: EngineConfig, **options: Any) -> None:
        report(options["progress"])

    monkeypatch.setattr(LLMEngine, "__init__", start)
    LLM("tiny")


def start_async(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: AsyncLLM, config: object, name: object, session: object, progress: ProgressCallback) -> None:
        report(progress)

    monkeypatch.setattr(AsyncLLM, "_start", start)
    AsyncLLM("tiny")


@pytest.mark.parametrize("start", [start_llm, start_async])
def test_a_start_in_a_cell_shows_its_stages(
    cell: Cell, monkeypatch: pytest.MonkeyPatch, start: Callable[[pytest.MonkeyPatch], None]
) -> None:
    start(monkeypatch)
    title, load, ready = cell.text.splitlines()
    assert title == "starting tiny"
    assert load.startswith("  ✓ load")
    assert load.endswith("reading layers")
    assert ready.startswith("  ✓ ready")


def test_a_start_that_fails_in_a_cell_shows_in_which_stage(cell: Cell) -> None:
    def fail() -> None:
        with start_progress("starting tiny", ParallelConfig()) as progress:
            report(progress)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert "✗ load" in cell.text


def test_a_start_elsewhere_is_a_line_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    start_async(monkeypatch)
    assert "starting tiny: reading layers 100%" in sys.stderr.getvalue()  # type: ignore[attr-defined]
