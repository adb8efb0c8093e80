"""A comparison as a kernel runs it: awaited, in one grid that is replaced in place. And what a cell had before."""

from __future__ import annotations

import asyncio
import re

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, RequestError
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.generation.view import UPDATE_SECONDS
from tests.unit.magics.conftest import FakeClient
from tests.unit.magics.kernel_cells import in_cell, publisher, run, until

HOSTILE = "</td></table><script>alert(1)</script><img src=x onerror=alert(1)>"


def html_of(shell: InteractiveShell) -> str:
    (output,) = publisher(shell).outputs()
    return output["text/html"]


async def test_the_cell_ends_with_one_table_in_html_and_plain_text(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel_shell.user_ns["qs"] = {"first": "Q1", "second": "Q2"}
    (await run(kernel_shell, "%%generate --each qs --temperature 0,1 -o grid\n{qs}\n")).raise_error()
    (output,) = publisher(kernel_shell).outputs()
    assert set(output) == {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"}
    assert output["text/html"].count("<tr ") == 2
    assert output["text/html"].count("<td ") == output["text/html"].count("Hello world") == 4
    assert "── qs second · temperature 1 ──\nHello world\n[3 tokens" in output["text/plain"]
    assert capsys.readouterr().out == ""
    assert kernel_shell.user_ns["_"] is kernel_shell.user_ns["grid"]
    assert [prompt["prompt"] for prompt, _ in engine.requests] == [
        "<user>Q1",
        "<user>Q1",
        "<user>Q2",
        "<user>Q2",
    ]


async def test_the_grid_grows_while_answers_are_written_and_says_how_far_it_is(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2 --max-tokens 9\nhi\n"))
    await until(lambda: bool(publisher(kernel_shell).messages))
    assert html_of(kernel_shell).count("waiting") == 2
    assert "0 of 2 answers · 0 tokens" in html_of(kernel_shell)
    engine.emit("alpha", None, 0)
    await until(lambda: "alpha" in html_of(kernel_shell))
    assert "1 running" in html_of(kernel_shell)
    assert html_of(kernel_shell).count("waiting") == 1
    engine.emit("right", "stop", 1)
    await until(lambda: "1 of 2 answers" in html_of(kernel_shell))
    assert "1 token ✓" in html_of(kernel_shell)
    assert "tok/s" in html_of(kernel_shell)
    assert " left</div>" in html_of(kernel_shell)
    engine.emit("!", "length", 0)
    (await cell).raise_error()
    messages = publisher(kernel_shell).messages
    assert [update for update, _, _ in messages] == [False] + [True] * (len(messages) - 1)
    assert "[2 answers · 1 stopped at the limit · 3 tokens" in messages[-1][1]["text/plain"]


async def test_nothing_is_sent_while_nothing_changes(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2\nhi\n"))
    await until(lambda: bool(engine.collectors) and bool(publisher(kernel_shell).messages))
    before = len(publisher(kernel_shell).messages)
    await asyncio.sleep(5 * UPDATE_SECONDS)
    assert len(publisher(kernel_shell).messages) == before
    engine.emit("a", "stop", 0)
    engine.emit("b", "stop", 1)
    (await cell).raise_error()


async def test_many_fast_streams_share_their_updates(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    seeds = ",".join(map(str, range(64)))
    cell = asyncio.create_task(run(kernel_shell, f"%%generate --seed {seeds}\nhi\n"))
    await until(lambda: len(engine.collectors) == 64)
    started = asyncio.get_running_loop().time()
    for _ in range(40):
        for index in range(64):
            engine.emit("word ", None, index)
        await asyncio.sleep(0.01)
    for index in range(64):
        engine.emit("", "length", index)
    (await cell).raise_error()
    elapsed = asyncio.get_running_loop().time() - started
    sent = publisher(kernel_shell).messages
    assert len(sent) <= elapsed / UPDATE_SECONDS + 3
    assert sum(len(data["text/html"]) for _, data, _ in sent[:-1]) <= 250_000 * elapsed + 120_000
    assert {answer.text for answer in kernel_shell.user_ns["_"]} == {"word " * 40}


async def test_an_interrupt_ends_all_requests_and_keeps_what_they_had(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2,3 -o grid\nhi\n"))
    await until(lambda: len(engine.collectors) == 3)
    engine.emit("whole", "stop", 0)
    engine.emit("half", None, 1)
    await until(lambda: "half" in html_of(kernel_shell))
    engine.emit(", drained", None, 1)
    cell.cancel()
    outcome = await cell
    assert isinstance(outcome.error_in_exec, KeyboardInterrupt)
    grid = kernel_shell.user_ns["grid"]
    assert grid is kernel_shell.user_ns["_"]
    assert [(a.text, a.finish_reason) for a in grid] == [
        ("whole", "stop"),
        ("half, drained", "abort"),
        ("", "abort"),
    ]
    assert engine.aborted == [collector.request_id for collector in engine.collectors[1:]]
    shown = publisher(kernel_shell).outputs()[0]["text/plain"]
    assert "half, drained\n[ended early · 2 tokens" in shown
    assert "[3 answers · 2 ended early" in shown


async def test_a_dead_engine_ends_the_cell_with_one_error_and_the_texts_stay(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2\nhi\n"))
    await until(lambda: len(engine.collectors) == 2)
    engine.emit("half", None, 0)
    for collector in engine.collectors:
        collector.put_error(EngineDeadError("killed by signal 9"))
    outcome = await cell
    assert isinstance(outcome.error_in_exec, EngineDeadError)
    shown = publisher(kernel_shell).outputs()[0]["text/plain"]
    assert "half\nfailed: the engine ended" in shown
    assert "[2 of 2 failed: the engine ended]" in shown
    again = await run(kernel_shell, "%generate hi")
    assert "no engine is running here" in str(again.error_in_exec)


async def test_markup_in_names_prompts_answers_and_errors_is_dead(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    kernel_shell.user_ns["qs"] = {HOSTILE: HOSTILE, "b": HOSTILE, "c": "plain"}
    cell = asyncio.create_task(
        run(kernel_shell, "%%generate --each qs --system '<script>' --system b\n{qs}\n")
    )
    await until(lambda: len(engine.collectors) == 6)
    engine.emit(HOSTILE, None, 0)
    await until(lambda: html_of(kernel_shell).count("alert(1)") >= 3)
    engine.collectors[1].put_error(RequestError(HOSTILE))
    for index in (0, 2, 3, 4, 5):
        engine.emit(HOSTILE, "stop", index)
    (await cell).raise_error()
    for _, data, _ in publisher(kernel_shell).messages:
        tags = set(re.findall(r"<\s*([^\s>/]*)", data["text/html"]))
        assert tags <= {"div", "table", "tbody", "tr", "td", "th", "b", "span", ""}


async def test_without_a_stream_only_the_progress_is_shown_before_the_end(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2 --no-stream\nhi\n"))
    await until(lambda: len(engine.collectors) == 2)
    engine.emit("early", None, 0)
    await until(lambda: "1 running" in html_of(kernel_shell))
    assert "early" not in html_of(kernel_shell)
    engine.emit("!", "stop", 0)
    engine.emit("b", "stop", 1)
    (await cell).raise_error()
    assert "early!" in html_of(kernel_shell)


async def test_in_the_background_the_grid_goes_on_in_its_cell(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    (await run(kernel_shell, "%%generate -a -o later --seed 1,2\nhi\n")).raise_error()
    engine.emit("one", "stop", 0)
    engine.emit("two", "stop", 1)
    result = await kernel_shell.user_ns["later"]
    assert isinstance(result, ComparisonResult)
    assert "two" in publisher(kernel_shell).outputs()[0]["text/plain"]


async def test_a_line_magic_awaits_in_loops_and_stays_quiet(
    kernel_shell: InteractiveShell, engine: FakeClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (await run(kernel_shell, "for t in 'ab':\n    found = %generate --seed 1,2 {t}")).raise_error()
    assert len(engine.requests) == 4
    (await run(kernel_shell, "%generate --seed 1,2 hi")).raise_error()
    assert "ComparisonResult" not in capsys.readouterr().out
    kernel_shell.run_cell("found").raise_error()
    assert "ComparisonResult(2 results: 2 seed)" in capsys.readouterr().out


async def test_inside_another_magic_it_blocks_and_shows_the_same(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    cell = "%%time\nfound = %generate --seed 1,2 hi\n"
    (await asyncio.to_thread(kernel_shell.run_cell, cell)).raise_error()
    assert publisher(kernel_shell).outputs()[0]["text/html"].count("Hello world") == 2


async def test_a_cell_that_runs_again_shows_what_differs_on_demand(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    in_cell(kernel_shell, "one", "run 1")
    (await run(kernel_shell, "%%generate --diff -o a\nFrance <b>\n")).raise_error()
    assert "no answer before" in publisher(kernel_shell).outputs()[-1]["text/plain"]
    in_cell(kernel_shell, "two", "run 2")
    engine.words = ["Other"]
    (await run(kernel_shell, "%%generate\nelse\n")).raise_error()
    in_cell(kernel_shell, "one", "run 3")
    engine.words = ["Hello", " <i>moon"]
    publisher(kernel_shell).messages.clear()
    (await run(kernel_shell, "%%generate --diff -o b\nItaly <b>\n")).raise_error()
    answer, diff = publisher(kernel_shell).outputs()
    assert answer["text/plain"].startswith("Hello <i>moon")
    assert "2 of 4 prompt tokens reused" in answer["text/plain"]
    assert diff["text/plain"].endswith(
        "prompt:\n[-France-]{+Italy+} <b>\nanswer:\nHello [-world-]{+<i>moon+}"
    )
    assert "<i>" not in diff["text/html"]
    assert "&lt;i&gt;moon</ins>" in diff["text/html"]
    assert str(kernel_shell.user_ns["b"].diff()) == diff["text/plain"]
    (await run(kernel_shell, "%%generate\nagain\n")).raise_error()


async def test_a_comparison_differs_cell_by_cell(kernel_shell: InteractiveShell, engine: FakeClient) -> None:
    in_cell(kernel_shell, "one", "run 1")
    (await run(kernel_shell, "%%generate --seed 1,2 --diff\nhi\n")).raise_error()
    assert "--diff: there is no earlier answer" in publisher(kernel_shell).outputs()[0]["text/plain"]
    engine.words = ["Hello", " <i>"]
    in_cell(kernel_shell, "one", "run 2")
    publisher(kernel_shell).messages.clear()
    (await run(kernel_shell, "%%generate --seed 2,3 --diff\nho\n")).raise_error()
    shown = publisher(kernel_shell).outputs()[0]
    assert "── seed 2 ──\nHello [-world-]{+<i>+}" in shown["text/plain"]
    assert "── seed 3 ──\nHello <i>\n" in shown["text/plain"]
    assert shown["text/html"].count("<del ") == shown["text/html"].count("<ins ") == 1
    assert "<i>" not in shown["text/html"]
    result = kernel_shell.user_ns["_"]
    assert result[0].diff().changed
    assert result[1].previous is None
    assert not result[0].diff(result[1]).changed


async def test_tokens_are_shaded_where_their_probabilities_were_asked_for(
    kernel_shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.words = ["<b>", " & so"]
    line = "%%generate --temperature 0,1 --logprobs 1"
    (await run(kernel_shell, f"{line}\nhi\n")).raise_error()
    (shown,) = publisher(kernel_shell).outputs()
    # A probability of exp(-0.5) shades a token.
    assert shown["text/html"].count('<span title="61 %') == 4
    assert shown["text/html"].count("&lt;b&gt;</span>") == 2
    assert "<b>" not in shown["text/html"].replace("<b>0</b>", "").replace("<b>1</b>", "")
    assert shown["text/plain"].count("<b> & so\n[2 tokens") == 2

    monkeypatch.setattr("nbengine.magics.comparison.view.MOST_SHADED", 3)
    for asked, noted in ((line, True), ("%%generate --temperature 0,1", False)):
        (await run(kernel_shell, f"{asked}\nhi\n")).raise_error()
        shown = publisher(kernel_shell).outputs()[-1]
        assert "<span title" not in shown["text/html"]
        assert ("more than 3 tokens are not shaded" in shown["text/html"]) == noted
    (await run(kernel_shell, f"{line} -f markdown\nhi\n")).raise_error()
    shown = publisher(kernel_shell).outputs()[-1]
    assert "<span title" not in shown["text/markdown"]
    assert "not shaded" not in shown["text/markdown"]
