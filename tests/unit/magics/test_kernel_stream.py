"""`%%generate` as a kernel runs it: awaited, into one output that is replaced in place."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, InvalidArgumentError
from nbengine.magics.extension import Extension
from nbengine.magics.generation.render import CARET
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.view import DUTY, UPDATE_SECONDS, Appearance, CellView
from nbengine.magics.interrupts import Interrupted, ticking
from nbengine.outputs import CompletionOutput
from nbengine.widgets.live import LiveDisplay, MimeBundle
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import publisher, run, until


async def test_the_cell_ends_with_one_output_in_plain_text_and_html(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (await run(kernel_shell, "%%generate -o answer\nhi & <bye>\n")).raise_error()
    outputs = publisher(kernel_shell).outputs()
    assert len(outputs) == 1
    assert outputs[0]["text/plain"].startswith("Hello world\n\n[3 tokens")
    assert "Hello world" in outputs[0]["text/html"]
    assert capsys.readouterr().out == ""
    assert kernel_shell.user_ns["_"] is kernel_shell.user_ns["answer"]
    assert engine.requests[0][0] == {"prompt": "<user>hi & <bye>"}


async def test_text_appears_while_it_is_written_and_html_in_it_is_dead(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate\nhi\n"))
    await until(lambda: bool(engine.collectors))
    engine.emit("<script>")
    await until(lambda: bool(publisher(kernel_shell).messages))
    update, data, _ = publisher(kernel_shell).messages[0]
    assert not update
    assert data["text/plain"].startswith("<script>\n\n[1 token")
    assert "&lt;script&gt;" + CARET in data["text/html"]
    assert "&lt;script&gt;" in data["text/html"]
    assert "<script>" not in data["text/html"]
    engine.emit("!", "stop")
    (await cell).raise_error()
    assert all(update for update, _, _ in publisher(kernel_shell).messages[1:])
    assert CARET not in publisher(kernel_shell).messages[-1][1]["text/html"]


async def test_several_answers_grow_together_under_their_numbers_and_all_stay(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate -n 2 -o both\nhi\n"))
    await until(lambda: bool(engine.collectors))
    engine.emit("one", completion=0)
    engine.emit("two", completion=1)
    await until(lambda: bool(publisher(kernel_shell).messages))
    assert publisher(kernel_shell).messages[-1][1]["text/plain"].startswith("1.\none\n\n2.\ntwo\n\n[2 tokens")
    engine.emit("!", "stop", completion=0)
    engine.emit("?", "length", completion=1)
    (await cell).raise_error()
    (shown,) = publisher(kernel_shell).outputs()
    assert shown["text/plain"].startswith("1.\none!\n\n2.\ntwo?\n\n[1 of 2 stopped at the limit · 4 tokens")
    result = kernel_shell.user_ns["both"]
    assert [completion.text for completion in result.outputs] == ["one!", "two?"]
    assert (result.text, result.finish_reason, result.finished) == ("one!", "stop", True)
    assert engine.requests[0][1].n == 2


async def test_an_interrupt_keeps_what_each_answer_had(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate -n 3 -o all\nhi\n"))
    await until(lambda: bool(engine.collectors))
    engine.emit("one", "stop", completion=0)
    engine.emit("two", completion=1)
    await until(lambda: bool(publisher(kernel_shell).messages))
    cell.cancel()
    assert isinstance((await cell).error_in_exec, KeyboardInterrupt)
    result = kernel_shell.user_ns["all"]
    assert [(c.text, c.finish_reason) for c in result.outputs] == [("one", "stop"), ("two", "abort")]
    assert result.finished


async def test_a_fast_stream_is_batched(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate\nhi\n"))
    await until(lambda: bool(engine.collectors))
    started = asyncio.get_running_loop().time()
    for _ in range(300):
        engine.emit("x")
        await asyncio.sleep(0.0005)
    engine.emit("", "length")
    (await cell).raise_error()
    elapsed = asyncio.get_running_loop().time() - started
    assert len(publisher(kernel_shell).messages) <= elapsed / UPDATE_SECONDS + 3
    assert kernel_shell.user_ns["_"].text == "x" * 300


async def test_cancelling_keeps_the_text_and_the_result(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate -o answer\nhi\n"))
    await until(lambda: bool(engine.collectors))
    engine.emit("half an answer")
    await until(lambda: bool(publisher(kernel_shell).messages))
    engine.emit(", drained")
    cell.cancel()
    outcome = await cell
    assert isinstance(outcome.error_in_exec, KeyboardInterrupt)
    answer = kernel_shell.user_ns["answer"]
    assert answer is kernel_shell.user_ns["_"]
    assert (answer.text, answer.finish_reason) == ("half an answer, drained", "abort")
    assert engine.aborted == [answer.request_id]
    assert "half an answer, drained\n\n[ended early" in publisher(kernel_shell).outputs()[0]["text/plain"]
    engine.words = ["again"]
    (await run(kernel_shell, "%%generate\nhi\n")).raise_error()
    assert kernel_shell.user_ns["_"].text == "again"


async def test_an_engine_that_dies_raises_with_its_log(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate\nhi\n"))
    await until(lambda: bool(engine.collectors))
    engine.emit("before")
    engine.collectors[0].put_error(EngineDeadError("core 0 was killed", "the last line"))
    error = (await cell).error_in_exec
    assert isinstance(error, EngineDeadError)
    assert "the last line" in str(error)
    assert kernel_shell.user_ns["_"].text == "before"


async def test_generate_works_in_assignments_loops_and_functions(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    code = (
        "import asyncio\n"
        "answers = []\n"
        "for word in ['a', 'b']:\n"
        "    if word:\n"
        "        answer = %generate --raw {word}?\n"
        "    answers.append(answer)\n"
        "def later():\n"
        "    return get_ipython().run_line_magic('generate', '--raw c')\n"
        "answers.append(later())\n"
        "await asyncio.sleep(0)\n"
        "%generate --raw d\n"
    )
    (await run(kernel_shell, code)).raise_error()
    assert [prompt for prompt, _ in engine.requests] == ["a?", "b?", "c", "d"]
    assert [type(answer) for answer in kernel_shell.user_ns["answers"]] == [GenerationResult] * 3


async def test_a_line_magic_shows_its_text_once(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (await run(kernel_shell, "%generate hi")).raise_error()
    assert len(publisher(kernel_shell).outputs()) == 1
    assert "GenerationResult" not in capsys.readouterr().out
    assert kernel_shell.user_ns["_"].text == "Hello world"
    kernel_shell.run_cell("_")
    assert "GenerationResult('random-tiny-1', 3 tokens" in capsys.readouterr().out


async def test_a_cell_inside_a_cell_blocks_and_still_works(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    (
        await run(kernel_shell, "await __import__('asyncio').sleep(0)\n%time answer = %generate hi")
    ).raise_error()
    inner = "await __import__('asyncio').sleep(0)\nget_ipython().run_cell('%%generate --raw\\nnested\\n')"
    (await run(kernel_shell, inner)).raise_error()
    assert kernel_shell.user_ns["answer"].text == "Hello world"
    assert [prompt for prompt, _ in engine.requests] == [{"prompt": "<user>hi"}, "nested"]


async def test_background_text_goes_on_after_the_cell(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o later\nhi\n")).raise_error()
    assert publisher(kernel_shell).outputs()[0]["text/plain"] == "\n\n[in the background …]"
    engine.emit("streamed ")
    await asyncio.to_thread(publisher(kernel_shell).wait_for, "streamed ")
    engine.emit("later", "stop")
    result = await kernel_shell.user_ns["later"]
    assert result.text == "streamed later"
    outputs = publisher(kernel_shell).outputs()
    assert len(outputs) == 1
    assert outputs[0]["text/plain"].startswith("streamed later\n\n[2 tokens")


async def test_a_refused_background_request_leaves_no_output(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.refusal = InvalidArgumentError("prompt", 3, "a string")
    assert isinstance((await run(kernel_shell, "%%generate -a\nhi\n")).error_in_exec, UsageError)
    assert publisher(kernel_shell).messages == []


async def test_a_background_failure_is_told_in_its_cell(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o later\nhi\n")).raise_error()
    engine.emit("before")
    engine.collectors[0].put_error(EngineDeadError("core 0 was killed", "log"))
    with pytest.raises(EngineDeadError):
        await kernel_shell.user_ns["later"]
    assert kernel_shell.user_ns["later"].text == "before"
    (output,) = publisher(kernel_shell).outputs()
    assert "[ended early · 1 token" in output["text/plain"]
    assert output["text/plain"].endswith("EngineDeadError: core 0 was killed]")


@pytest.mark.parametrize("flags", ["", "-a -o handle"])
async def test_an_output_that_cannot_be_shown_leaves_an_answer_that_has_ended_unseen(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    def fail(view: CellView, result: object, note: str = "") -> None:
        raise OSError("no room")

    monkeypatch.setattr(CellView, "finish", fail)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    outcome = await run(kernel_shell, f"%%generate {flags}\nhi\n")
    if flags:
        with pytest.raises(OSError, match="no room"):
            await kernel_shell.user_ns["handle"]
    else:
        assert isinstance(outcome.error_in_exec, OSError)
    (answer,) = Extension.loaded[kernel_shell].session.ongoing.answers.newest_first()
    assert answer.ended is not None
    assert engine.read == []


async def test_a_background_failure_that_cannot_be_shown_is_in_the_handle(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(view: CellView, result: object, note: str = "") -> None:
        raise OSError("no room")

    monkeypatch.setattr(CellView, "finish", fail)
    monkeypatch.setattr("threading.excepthook", lambda args: None)
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o later\nhi\n")).raise_error()
    engine.collectors[0].put_error(EngineDeadError("core 0 was killed", "log"))
    with pytest.raises(EngineDeadError):
        kernel_shell.user_ns["later"].result(60)


async def test_capture_captures_every_update(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    await asyncio.to_thread(
        kernel_shell.run_cell, "%%capture out\nget_ipython().run_cell_magic('generate', '', 'hi')"
    )
    assert publisher(kernel_shell).messages == []
    assert "Hello world" in kernel_shell.user_ns["out"].outputs[0].data["text/plain"]


@pytest.mark.parametrize(
    ("output_format", "mime", "content"),
    [
        ("text", "text/html", 'style="white-space:pre-wrap'),
        ("markdown", "text/markdown", '{"a": 1}'),
        ("json", "text/html", "{\n  &quot;a&quot;: 1\n}"),
        ("code", "text/markdown", '```\n{"a": 1}\n```'),
    ],
)
async def test_an_answer_is_shown_in_each_format(
    kernel_shell: InteractiveShell, engine: FakeClient, output_format: str, mime: str, content: str
) -> None:
    engine.words = [json.dumps({"a": 1})]
    (await run(kernel_shell, f"%%generate -f {output_format}\nhi\n")).raise_error()
    (output,) = publisher(kernel_shell).outputs()
    assert set(output) == {"text/plain", mime}
    assert content in output[mime]
    assert "[1 token" in output["text/plain"]


async def test_without_a_footer_only_the_text_is_shown(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    kernel_shell.run_cell("%config NBEngine.footer = False")
    (await run(kernel_shell, "%%generate --no-stream\nhi\n")).raise_error()
    assert [data["text/plain"] for _, data, _ in publisher(kernel_shell).messages] == ["Hello world"]


def test_long_answers_are_updated_less_often(kernel_shell: InteractiveShell) -> None:
    result = GenerationResult("r", "prompt")
    view = CellView(kernel_shell, Appearance())
    result.outputs = [CompletionOutput(0, "short", [1])]
    view.update(result)
    assert view.interval < 2 * UPDATE_SECONDS
    result.outputs = [CompletionOutput(0, "x" * 100_000, [1])]
    view.update(result)
    assert 200_000 / view.interval < 300_000


def test_a_pause_of_the_machine_while_an_answer_is_drawn_does_not_slow_it_down(
    kernel_shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = LiveDisplay.show

    def show_late(self: LiveDisplay, bundle: MimeBundle) -> int:
        time.sleep(0.1)
        return show(self, bundle)

    monkeypatch.setattr(LiveDisplay, "show", show_late)
    result = GenerationResult("r", "prompt")
    result.outputs = [CompletionOutput(0, "short", [1])]
    view = CellView(kernel_shell, Appearance())
    view.update(result)
    assert view.interval < 0.1 / DUTY


async def test_ticking_wakes_an_idle_loop() -> None:
    woken = threading.Event()
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()

    def from_a_signal_handler() -> None:
        # Like ipykernel's handler, this only appends to the loop's queue, without waking its selector.
        loop.call_soon(waiter.set_result, None)
        woken.set()

    timer = threading.Timer(0.1, from_a_signal_handler)
    async with asyncio.timeout(60), ticking():
        timer.start()
        await waiter
    timer.join()
    assert woken.is_set()


def test_an_interrupt_is_shown_as_one_line(
    kernel_shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        raise Interrupted("generation interrupted")
    except Interrupted:
        kernel_shell.showtraceback(sys.exc_info())  # type: ignore[arg-type]
    assert capsys.readouterr().out.strip() == "KeyboardInterrupt: generation interrupted"


def test_a_shell_without_a_running_loop_keeps_the_blocking_call(kernel_shell: InteractiveShell) -> None:
    assert "await" not in kernel_shell.transform_cell("%%generate\nhi\n")


async def test_code_that_only_mentions_the_magic_is_left_alone(kernel_shell: InteractiveShell) -> None:
    for code in (
        "text = \"get_ipython().run_line_magic('generate', 'x')\"\n",
        "def f():\n    return get_ipython().run_line_magic('generate', 'x')\n",
        "class A:\n    x = get_ipython().run_line_magic('generate', 'x')\n",
        "x = [get_ipython().run_line_magic('generate', 'x')]\n",
    ):
        assert kernel_shell.transform_cell(code) == code


async def test_no_autoawait_keeps_the_blocking_call(kernel_shell: InteractiveShell, engine: Any) -> None:
    kernel_shell.autoawait = False
    assert "await" not in kernel_shell.transform_cell("%%generate\nhi\n")
