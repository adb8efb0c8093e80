"""A cell that streams, in a real kernel, from an engine in another process that writes at a steady pace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from notebook_support.kernel import Cell, Kernel
from notebook_support.paced import start_line

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
TOKENS_PER_SECOND = 200


@pytest.fixture(scope="module")
def times_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("times") / "times"


@pytest.fixture(scope="module")
def notebook(kernel: Kernel, times_file: Path) -> Iterator[Kernel]:
    """A kernel with an engine that writes 200 tokens a second; `llm` is its client."""
    kernel.run(start_line(tokens_per_second=TOKENS_PER_SECOND, times_file=str(times_file)) + " -o llm")
    yield kernel
    kernel.run("%engine stop")


def wait_until_idle(notebook: Kernel) -> None:
    """Wait until the engine has no request and every block is free."""
    notebook.run(
        "import time\n"
        "deadline = time.monotonic() + 5\n"
        "while (s := llm.stats_blocking().engines[0]).num_running_reqs or s.num_free_blocks < s.num_blocks:\n"
        "    assert time.monotonic() < deadline, s\n"
        "    time.sleep(0.01)"
    )


def texts(cell: Cell) -> list[str]:
    return [data["text/plain"].partition("\n\n[")[0] for _, data in cell.updates]


def test_the_text_grows_in_place_and_is_shown_once(notebook: Kernel) -> None:
    cell = notebook.run("%%generate -o answer --max-tokens 300\nhi\n")
    assert len(cell.outputs) == 1
    assert set(cell.outputs[0]["data"]) == {"text/plain", "text/html"}
    expected = (ALPHABET * 12)[:300]
    assert texts(cell)[-1] == expected
    # A view is drawn when it has time: at least in the middle and at the end.
    assert len(set(texts(cell))) >= 2
    assert all(expected.startswith(text) for text in texts(cell))
    assert "300 tokens" in cell.text
    assert notebook.value("(answer.text, _ is answer, answer.finish_reason)") == (expected, True, "length")
    again = notebook.run("answer")
    assert ALPHABET not in again.text
    assert "GenerationResult" in again.text


def test_every_token_reaches_the_cell_while_others_are_made(notebook: Kernel, times_file: Path) -> None:
    times_file.write_text("")
    cell = notebook.start("%%generate -o answer --max-tokens 3000\nhi\n")
    # All of them take 15 seconds. How soon, and what it costs: benchmarks/bench_streaming.py.
    notebook.pump(lambda: len(cell.updates) > 10 or cell.ended > 0, "updates of the cell")
    notebook.interrupt()
    notebook.finish(cell)
    num_tokens, reason = notebook.value("(len(answer.token_ids), answer.finish_reason)")
    assert reason == "abort"
    assert len(cell.updates) > 10
    wait_until_idle(notebook)
    made = [float(line) for line in times_file.read_text().split()]
    delays: list[float] = []
    for (arrived, _), text in zip(cell.updates, texts(cell), strict=True):
        delays += [arrived - made[index] for index in range(len(delays), len(text))]
    assert len(delays) == num_tokens <= len(made) < 3000
    assert min(delays) > 0


def test_an_interrupt_ends_the_request_and_keeps_the_text(notebook: Kernel) -> None:
    for _ in range(6):
        cell = notebook.start("%%generate -o answer --max-tokens 3000\nhi\n")
        notebook.wait_for_text(cell, ALPHABET)
        notebook.interrupt()
        notebook.finish(cell)
        assert cell.status == "error"
        assert cell.outputs[1]["ename"] == "KeyboardInterrupt"
        assert len(cell.outputs[1]["traceback"]) == 1
        text, reason, tokens = notebook.value("(answer.text, answer.finish_reason, len(answer.token_ids))")
        assert reason == "abort"
        assert texts(cell)[-1] == text == (ALPHABET * 200)[:tokens]
        wait_until_idle(notebook)
        assert "3 tokens" in notebook.run("%%generate --max-tokens 3\nhi\n").text
        transformed, typed = notebook.value("(In[-2], _i)")
        assert transformed.startswith("await ")
        assert typed == "%%generate --max-tokens 3\nhi"


def test_an_interrupt_of_a_cell_that_awaits_a_handle_leaves_the_generation_alone(notebook: Kernel) -> None:
    notebook.run("%generate -a -o other --max-tokens 3000 hi")
    cell = notebook.start("print('waiting')\nawait other")
    notebook.wait_for_text(cell, "waiting")
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.status == "error"
    assert notebook.value("other.done") is False
    notebook.run("other.cancel()\nresult = other.result(60)")
    assert notebook.value("result.finish_reason") == "abort"
    wait_until_idle(notebook)


def test_an_interrupt_reaches_a_cell_that_blocks(notebook: Kernel) -> None:
    cell = notebook.start("%%time\n%generate -o answer --max-tokens 3000 hi\n")
    notebook.wait_for_text(cell, ALPHABET)
    notebook.interrupt()
    notebook.finish(cell)
    assert notebook.value("answer.finish_reason") == "abort"
    wait_until_idle(notebook)


def test_the_background_goes_on_while_other_cells_run(notebook: Kernel) -> None:
    notebook.run("%%generate -a -o long --max-tokens 3000\nhi\n")
    first = notebook.run("%%generate -a -o later --max-tokens 60\nhi\n")
    other = notebook.run("print('meanwhile', long.done)")
    assert "meanwhile False" in other.text
    done = notebook.run("long.cancel()\nresult = await later\nprint(result.text)")
    assert (ALPHABET * 3)[:60] in done.text
    notebook.pump(lambda: "60 tokens" in first.text, "the footer of the background cell")
    assert len(first.outputs) == 1


def test_variables_from_the_notebook_reach_the_prompt(notebook: Kernel) -> None:
    notebook.run("topic = 'bees'\nrow = {'k': [1, 2]}")
    notebook.run('%%generate -o answer --raw --max-tokens 2\n{topic} {row["k"][1]} {"json": {}} {{topic}}\n')
    assert notebook.value("answer.prompt") == 'bees 2 {"json": {}} {topic}'


def test_run_all_stops_at_a_mistake_of_one_line(notebook: Kernel) -> None:
    for code, message in (
        ("%%generate --max-token 3\nhi\n", "unknown flag --max-token; did you mean --max-tokens?"),
        ("%engine start", "is running already"),
        ("%%generate --temperature -1\nhi\n", "temperature must be"),
        ("%%generate --max-tokens 3\n" + "long " * 2000, "4096"),
    ):
        cell = notebook.run_any(code)
        assert cell.status == "error"
        (output,) = cell.outputs
        assert output["name"] == "stderr"
        assert output["text"].startswith("UsageError: ")
        assert message in output["text"]
        assert output["text"].count("\n") == 1


def test_loops_and_assignments_await_too(notebook: Kernel) -> None:
    code = "found = []\nfor word in 'ab':\n    answer = %generate --max-tokens 2 {word}?\n    found.append(answer.text)"
    notebook.run(code)
    assert notebook.value("found") == ["AB", "AB"]


def test_a_frontend_that_only_knows_text_and_one_that_knows_json_see_the_same(notebook: Kernel) -> None:
    cell = notebook.run("%%generate -f json --max-tokens 3\nhi\n")
    assert "ABC" in cell.outputs[0]["data"]["text/html"]
    assert "not valid JSON" in cell.text
    assert json.loads(json.dumps(cell.outputs[0]["data"])) == cell.outputs[0]["data"]
