"""A cell says how far a long prompt is, until its answer begins."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.frontend.outputs.output_collector import wake
from nbengine.magics.generation import view
from nbengine.magics.generation.render import prompt_line
from nbengine.magics.generation.result import GenerationResult
from nbengine.outputs import CompletionOutput, PromptProgress
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until

LINE = "reading 3,200 of 8,000 tokens, 1,100 reused, 9 s to go"


def report(engine: FakeClient, read: int = 3200, seconds: float = 4.5, index: int = -1) -> None:
    collector = engine.collectors[index]
    waiter = collector.report(PromptProgress(collector.request_id, 8000, read, 1100, seconds, 2 * seconds))
    if waiter is not None:
        wake([waiter])


def newest(shell: InteractiveShell) -> str:
    return publisher(shell).messages[-1][1]["text/plain"] if publisher(shell).messages else ""


@pytest.mark.parametrize(
    "line",
    [
        "%%generate -o answer",
        "%%generate --no-stream",
        "%%generate --format markdown",
        "%%generate --logprobs 2",
        "%%generate -n 2",
        "%%chat",
    ],
)
async def test_the_cell_says_how_far_the_prompt_is_and_shows_the_answer_in_the_same_place(
    kernel_shell: InteractiveShell, engine: FakeClient, line: str
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, f"{line}\nhi\n"))
    await until(lambda: bool(engine.collectors))
    report(engine)
    await until(lambda: LINE in newest(kernel_shell))

    def reported() -> bool:
        # A view is left in peace for a moment after each drawing, and takes the newest then.
        report(engine, read=7999)
        return "reading 7,999 of 8,000" in newest(kernel_shell)

    await until(reported)
    engine.emit("Hello", "stop")
    if "-n 2" in line:
        engine.emit("World", "stop", completion=1)
    (await cell).raise_error()
    (output,) = publisher(kernel_shell).outputs()
    assert "Hello" in output["text/plain"]
    assert not any("reading" in str(form) for form in output.values())


def test_an_answer_that_has_begun_has_no_line_about_its_prompt() -> None:
    result = GenerationResult("r", "hi")
    result.metrics.prompt_progress = PromptProgress("r", 8000, 3200, 1100, 4.0, 9.0)
    assert prompt_line(result) == LINE
    result.outputs = [CompletionOutput(0, "", [])]
    assert prompt_line(result) == LINE
    result.outputs = [CompletionOutput(0, "", []), CompletionOutput(1, "a", [5])]
    assert prompt_line(result) == ""


async def test_steps_that_are_shorter_than_a_view_needs_are_not_all_drawn(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "pause_after", lambda *_: 3600.0)
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate\nhi\n"))
    await until(lambda: bool(engine.collectors))
    for read in range(2000, 2050):
        report(engine, read=read)
        await until(lambda: engine.collectors[-1]._progress is None)
    assert len(publisher(kernel_shell).messages) == 1
    engine.emit("Hello", "stop")
    (await cell).raise_error()
    assert "Hello" in publisher(kernel_shell).outputs()[0]["text/plain"]


async def test_a_prompt_that_takes_no_time_is_not_spoken_of(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate -o answer\nhi\n"))
    await until(lambda: bool(engine.collectors))
    report(engine, seconds=0.2)
    engine.emit("Hello", "stop")
    (await cell).raise_error()
    assert not any("reading" in data["text/plain"] for _, data, _ in publisher(kernel_shell).messages)


async def test_a_background_cell_and_its_handle_know_how_far_the_prompt_is(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o handle\nhi\n")).raise_error()
    report(engine)
    await until(lambda: LINE in newest(kernel_shell))
    engine.emit("Hello", "stop")
    result = await asyncio.wait_for(kernel_shell.user_ns["handle"], 60)
    assert result.text == "Hello"
    (output,) = publisher(kernel_shell).outputs()
    assert "reading" not in output["text/plain"]


async def test_each_place_of_a_grid_says_how_far_its_own_prompt_is(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2\nhi\n"))
    await until(lambda: len(engine.collectors) == 2)
    report(engine, index=1)
    await until(lambda: LINE in publisher(kernel_shell).messages[-1][1]["text/html"])
    html = publisher(kernel_shell).messages[-1][1]["text/html"]
    assert html.count("waiting") == 1
    assert "1 running" in html
    assert html.count(LINE) == 1
    engine.emit("left", "stop", 0)
    engine.emit("right", "stop", 1)
    (await cell).raise_error()
    assert "reading" not in publisher(kernel_shell).outputs()[0]["text/html"]


@pytest.mark.parametrize("line", ["%%generate", "%%chat"])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_has_a_line_that_goes_and_a_pipe_has_none(
    shell: InteractiveShell,
    engine: FakeClient,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    engine.words = None
    submit, told = engine.submit, threading.Event()

    def submitted(*given: object, **named: object) -> object:
        collector = submit(*given, **named)  # type: ignore[arg-type]
        threading.Thread(target=answer, args=(collector,)).start()
        return collector

    def answer(collector: object) -> None:
        # It is told before it is answered, once its reader listens.
        while collector.on_prompt_progress is None:  # type: ignore[attr-defined]
            told.wait(0.001)
        report(engine)
        while collector._progress is not None:  # type: ignore[attr-defined]
            told.wait(0.001)
        engine.emit("Hello", "stop")

    monkeypatch.setattr(engine, "submit", submitted)
    shell.run_cell_magic(line.removeprefix("%%"), "", "hi")
    printed = capsys.readouterr().out
    assert ("reading" in printed) is is_terminal
    if is_terminal:
        before, after = printed.split(f"[{LINE}]")
        assert before.endswith("\r\x1b[2K\x1b[2m")
        assert after.startswith("\x1b[0m\r\x1b[2K")
        printed = after
    assert "Hello" in printed
