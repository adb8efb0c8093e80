"""A comparison in a real kernel, with one engine that writes at a steady pace and one that computes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from notebook_support.kernel import Kernel
from notebook_support.paced import start_line

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
WAIT_UNTIL_IDLE = """
import time
deadline = time.monotonic() + 5
while (s := paced.stats_blocking().engines[0]).num_running_reqs or s.num_free_blocks < s.num_blocks:
    assert time.monotonic() < deadline, s
    time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def notebook(kernel: Kernel) -> Iterator[Kernel]:
    """A kernel with both engines; the one that computes is the default."""
    kernel.run(start_line(name="paced", blocks=512, tokens_per_second=100) + " -o paced")
    kernel.run("%engine start random-tiny --name real --num-blocks 256")
    yield kernel
    kernel.run("%engine stop paced\n%engine stop real")


def test_a_grid_says_what_its_prompts_say_alone_and_its_columns_share_their_prompts(notebook: Kernel) -> None:
    notebook.run("words = ['sea', 'a longer word', '<b>'] \nalone = []")
    long = "Say something about it, and mind that more than a block of tokens is the same: "
    notebook.run(
        f"%%generate --raw --each words --temperature 0 --seed 1,2 --max-tokens 12 -o grid\n{long}{{words}}\n"
    )
    notebook.run(
        f"for word in words:\n    r = %generate --raw --temperature 0 --max-tokens 12 {long}{{word}}\n    alone.append(r.text)"
    )
    settings, texts, alone = notebook.value("(grid.settings, [r.text for r in grid], alone)")
    assert settings == [
        {"words": word, "seed": seed} for word in ("sea", "a longer word", "<b>") for seed in (1, 2)
    ]
    assert texts == [text for text in alone for _ in range(2)]
    assert all(texts)
    cached = notebook.value("[r.num_cached_tokens for r in grid]")
    assert all(count >= 64 for count in cached[1:]), cached


def test_all_requests_are_in_flight_together_while_one_grid_grows(notebook: Kernel) -> None:
    notebook.run("import time")
    first = notebook.run(
        "%%generate -a -o later --engine paced --each w=x,y,z --seed 1,2 -n 2 --max-tokens 400\nhi {w}\n"
    )
    counts = notebook.value(
        "[n for _ in range(10_000) if not later.done and not time.sleep(0.01)"
        " for n in [paced.stats_blocking().engines[0].num_running_reqs]]"
    )
    assert max(counts) == 12
    texts = notebook.run(
        "print([a.text for r in (await later) for a in r.outputs] == [later.results[0].text] * 12)"
    )
    assert "True" in texts.text
    notebook.pump(lambda: "[12 answers" in first.text, "the sums")
    assert len(first.outputs) == 1
    heads = [
        re.search(r"(\d+) of 12 answers · (\d+) running", data["text/html"]) for _, data in first.updates
    ]
    assert any(head is not None and head[2] == "6" for head in heads)
    assert any("left</div>" in data["text/html"] for _, data in first.updates)
    assert len(first.updates) > 5


def test_an_interrupt_ends_the_whole_grid_and_keeps_the_texts(notebook: Kernel) -> None:
    cell = notebook.start("%%generate --engine paced --seed 1,2,3 --max-tokens 3000 -o grid\nhi\n")
    notebook.pump(lambda: ALPHABET in str(cell.outputs), "the alphabet")
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.status == "error"
    assert cell.outputs[-1]["ename"] == "KeyboardInterrupt"
    assert len(cell.outputs) == 2
    texts, reasons = notebook.value("([r.text for r in grid], {r.finish_reason for r in grid})")
    assert reasons == {"abort"}
    assert all((ALPHABET * 200).startswith(text) and text in cell.text for text in texts)
    notebook.run(WAIT_UNTIL_IDLE)


def test_a_request_that_is_too_long_leaves_the_others_alone(notebook: Kernel) -> None:
    notebook.run("texts = ['hi', 'x' * 9000]")
    cell = notebook.run("%%generate --engine paced --max-tokens 5 --each w=texts -o grid\n{w}\n")
    assert "[1 of 2 failed: " in cell.text
    assert "4096" in cell.text
    assert notebook.value("[r.finish_reason for r in grid]") == ["length", "error"]


def test_engines_side_by_side_and_a_block_that_cannot_await(notebook: Kernel) -> None:
    cell = notebook.run("%%time\ngrid = %generate --engine paced,real --max-tokens 4 hi\n")
    assert "engine paced" in cell.text
    assert "engine real" in cell.text
    assert notebook.value("[s['engine'] for s in grid.settings]") == ["paced", "real"]
    assert notebook.value("grid[{'engine': 'paced'}].text") == "ABCD"


def test_answers_are_scored_by_functions_and_by_the_model_with_a_grammar(notebook: Kernel) -> None:
    notebook.run("async def size(result, row):\n    print('scoring', row['w'])\n    return len(result.text)")
    flags = "--raw --max-tokens 5 --score size --judge good -o grid"
    cell = notebook.run(f"%%generate --engine real --each w=x,y --temperature 0,1 {flags}\n{{w}}\n")
    assert cell.text.count("scoring x") == cell.text.count("scoring y") == 2
    rows = notebook.value("grid.rows()")
    assert [row["size"] for row in rows] == [len(row["text"]) for row in rows]
    assert all(row["judge"] in range(1, 6) for row in rows)
    assert notebook.value("[row['n'] for row in grid.summary()]") == [2] * 4


def test_an_interrupt_ends_the_grid_although_a_function_goes_on(notebook: Kernel) -> None:
    notebook.run("import threading\nheld = threading.Event()")
    notebook.run("def slow(result, row):\n    print('begun')\n    return held.wait(60) or 1")
    cell = notebook.start("%%generate --engine paced --max-tokens 3 --seed 1,2 --score slow -o grid\nhi\n")
    # It begins with the first answer that has ended; the other one may lack a token.
    notebook.pump(lambda: "begun" in cell.text and "2 of 2 answers" in str(cell.outputs), "the function")
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.outputs[-1]["ename"] == "KeyboardInterrupt"
    notebook.run("held.set()")
    assert notebook.value("[(row['text'], row['slow']) for row in grid.rows()]") == [("ABC", None)] * 2


def test_a_cell_that_runs_again_is_compared_with_itself(notebook: Kernel) -> None:
    notebook.run("%%generate --engine paced --max-tokens 3 --diff\nfirst\n")
    cell = notebook.run("%%generate --engine paced --max-tokens 5 --diff\nsecond\n")
    assert "prompt:\n[-first-]{+second+}\nanswer:\n[-ABC-]{+ABCDE+}" in cell.text
