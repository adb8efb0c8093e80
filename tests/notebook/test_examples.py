"""The example notebooks run from top to bottom; they are committed without outputs, or with those of a whole run.

They run in a kernel, which costs half as much as JupyterLab; `make thorough` runs all of them there, and
`lab/test_quickstart.py` the first one.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from notebook_support.examples import CELL_SECONDS, EXAMPLES, code_of, example, plain, run_all_in_lab
from notebook_support.kernel import SharedKernel

from tests.support.thorough import THOROUGH

RunExample = Callable[[str], list[nbformat.NotebookNode]]

MACHINE_PATH = re.compile(r"/tmp/|/home/|/root/|/work/")


@pytest.fixture
def run_in_lab(request: pytest.FixtureRequest, with_spare_engines: None) -> Iterator[RunExample]:
    """Run an example as a person does; returns its code cells."""
    request.getfixturevalue("clean_afterwards")
    desk = request.getfixturevalue("desk")

    yield functools.partial(run_all_in_lab, desk)
    desk.clear()


@pytest.fixture
def run_in_kernel(shared_kernel: SharedKernel, clean_afterwards: None) -> Iterator[RunExample]:
    """Run an example in a kernel, cell after cell, of which each must succeed; returns its code cells."""
    kernel = shared_kernel.take()

    def run(stem: str) -> list[nbformat.NotebookNode]:
        code = code_of(example(stem))
        ran = [kernel.run(cell.source, CELL_SECONDS) for cell in code]
        # Only now: what goes on in the background changes the outputs of earlier cells.
        for cell, done in zip(code, ran, strict=True):
            cell.outputs = [nbformat.from_dict(output) for output in done.outputs]
        return code

    yield run
    shared_kernel.give_back()


@pytest.fixture
def run_example(request: pytest.FixtureRequest) -> RunExample:
    """Run an example in a kernel, or in `make thorough` in JupyterLab; returns its code cells."""
    run: RunExample = request.getfixturevalue("run_in_lab" if THOROUGH else "run_in_kernel")
    return run


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_valid_and_has_no_outputs_or_those_of_one_whole_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    code = code_of(notebook)
    counts = [cell.execution_count for cell in code]
    if any(counts):
        assert counts == list(range(1, len(code) + 1))
        assert not any(output.output_type == "error" for cell in code for output in cell.outputs)
        assert not MACHINE_PATH.search(path.read_text())
    else:
        assert not any(cell.outputs for cell in code)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_workers_run_agree_and_die_as_the_example_says(run_example: RunExample) -> None:
    code = run_example("02_tensor_parallel")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    starts = [cell for cell in code if cell.source.startswith("%engine start random-tiny --tp 2 --pp 2")]
    assert len(starts) == 2
    for cell in starts:
        assert all(f"TP{tp} PP{pp}" in plain(cell) for tp in range(2) for pp in range(2))
    (tree,) = (cell for cell in code if cell.source == "%engine tree")
    assert set(tree.outputs[0].data) == {"text/plain", "text/html", "image/svg+xml"}
    workers = re.findall(r"rank \d: pid (\d+)", shown["tree = engine.process_tree()"])
    assert re.findall(r"worker \d: TP\d PP\d  pid (\d+)", plain(tree)) == workers
    assert shown["import asyncio"].count("yes") == 4
    assert "NO" not in shown["import asyncio"]
    assert (
        "tensor_parallel_size must be 1 or 3" in shown["from nbengine import AsyncLLM, InvalidArgumentError"]
    )
    assert "tokens ·" in shown["%%generate --engine three --temperature 0 --max-tokens 24"]
    assert "TP 2 × PP 2" in shown["%engine status"]
    assert "TP1 PP0 has" in shown["%engine logs --rank 1 -n 5"]
    death = shown["import os"]
    assert f"worker 1 (TP1 PP0), pid {workers[1]}, was killed by signal 9" in death
    assert float(death.split()[1]) < 60
    gone = next(plain(cell) for cell in code if cell.source.startswith("engine.shutdown()"))
    assert gone.count("✗ gone") == 6
    assert "no engine runs on this machine" in shown["%engine ps"]
    assert shown["await ask_all(engine) == divided"] == "True"
    assert "6 processes are gone" in shown["%engine stop"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_several_engine_cores_balance_scale_and_step_in_waves_as_the_example_says(
    run_example: RunExample,
) -> None:
    code = run_example("03_data_parallel")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    for name in ("%engine start random-tiny --dp 2", "%engine start random-tiny-moe --dp 2"):
        (start,) = (text for line, text in shown.items() if line.startswith(f"{name} "))
        assert all(f"✓ DP{rank}" in start for rank in range(2))
        assert "2 engine cores on cpu" in start
    ranks = re.findall(r"rank (\d): (\d+) requests, +(\d+) tokens", shown["import asyncio"])
    assert [rank for rank, _, _ in ranks] == ["0", "1"]
    assert sum(int(requests) for _, requests, _ in ranks) == 12
    assert sum(int(tokens) for _, _, tokens in ranks) == 3 * 600 + 9 * 50
    assert all(int(requests) >= 3 for _, requests, _ in ranks)
    assert "· rank 1]" in shown["%%generate -t 1 --temperature 0 --max-tokens 12 --set ignore_eos=True"]
    assert "3 engine cores on cpu" in shown["%engine scale --dp 3"]
    served = re.findall(r"\d", next(text for text in shown.values() if text.startswith("served by rank")))
    assert set(served) == {"0", "1", "2"}
    assert "was scaled in" in shown["%engine scale --dp 1"]
    timeline = shown["with moe.record_waves() as recording:"]
    assert "2 engine cores in lock step" in timeline
    # A wave may be over before the request that it has begun for has come.
    assert re.search(r"waves 0 to [1-3]\b", timeline)
    pictures = [
        output for cell in code for output in cell.outputs if "image/svg+xml" in output.get("data", {})
    ]
    assert len(pictures) == 4, "two recordings, the panel and the tree"
    dummies = [
        int(number) for number in re.findall(r"(\d+) dummy steps", shown["timeline = recording.timeline"])
    ]
    assert len(dummies) == 2
    assert min(dummies) > 100


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prompts_are_compared_branched_and_discussed_as_the_example_says(run_example: RunExample) -> None:
    code = run_example("04_prompt_iteration")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    moods, notes = (
        text
        for line, text in shown.items()
        if line.startswith(("%%generate -o moods", "%%generate -o notes"))
    )
    assert moods.count("temperature") >= 3
    assert "6 answers" in moods
    assert "6 answers" in notes
    assert len(shown["for row in notes.rows():"].splitlines()) == 6
    tried = next(text for line, text in shown.items() if line.startswith("%%generate -o tried"))
    assert re.search(r"setting +short +capital_matches +judge\n", tried)
    assert len(re.findall(r"\[short: (?:yes|no) · capital_matches: (?:yes|no) · judge: [1-5]\]", tried)) == 8
    assert shown["for row in tried.differences():"].count(", 4 prompts") == 3
    difference = shown["after.diff(before)"]
    assert "[-polite-]{+short+}" in difference
    assert "reused" in shown["%%generate -o after --temperature 0 --max-tokens 50"]
    tree = next(text for line, text in shown.items() if line.startswith("second = "))
    assert re.search(r"└─ 1  .* at \d+: ", tree)
    first, second = (text for line, text in shown.items() if line.startswith("%%chat"))
    assert "tokens ·" in first
    assert "prompt tokens reused" in second
    assert (
        shown['[(message["role"], message["content"][:50]) for message in talk.messages]'].count("user") == 2
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_answers_have_the_shape_that_the_example_asks_for(run_example: RunExample) -> None:
    code = run_example("05_structured_output")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    mood = next(text for line, text in shown.items() if line.startswith("%%generate -o mood "))
    assert mood.splitlines()[0] in ("positive", "negative")
    rows = shown["for row in moods.rows():"].splitlines()
    assert len(rows) == 3
    assert {row.split()[0] for row in rows} <= {"positive", "negative", "neutral"}
    assert shown['place.value["city"], type(place.value["population"]).__name__'].endswith("'int')")
    date = next(text for line, text in shown.items() if line.startswith("%%generate -o date"))
    assert re.fullmatch(r"[12]\d{3}-[01]\d-[0-3]\d", date.splitlines()[0])
    assert "the token the model wanted least" in shown["import math"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_chunks_and_preemptions_are_seen_as_the_example_says(run_example: RunExample) -> None:
    code = run_example("06_inside_the_scheduler")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    told = next(text for line, text in shown.items() if line.startswith("preempted = "))
    preempted = [int(number) for number in re.findall(r"\d+", told.splitlines()[0])]
    assert len(preempted) == 8
    assert sum(preempted) > 0
    pictures = [cell for cell in code if cell.source == "display(board.static(), raw=True)"]
    assert len(pictures) == 2
    for cell in pictures:
        assert set(cell.outputs[0].data) >= {"text/plain", "text/html"}
    assert "KV 30 blocks of 16 tokens" in plain(pictures[1])
    (board,) = (cell for cell in code if cell.source == "%dashboard -o board")
    assert "ended" in plain(board)
    assert "32 tokens a step" in shown["def mean(values):"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_prefixes_are_shared_as_the_example_says(run_example: RunExample) -> None:
    code = run_example("07_kv_cache")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    told = next(text for line, text in shown.items() if line.startswith("for question, answer"))
    first, *others = (int(line.split()[0]) for line in told.splitlines())
    assert first == 0
    assert min(others) >= 96
    story = next(text for line, text in shown.items() if line.startswith('print("computed for'))
    new, again, end, beginning = (int(reused) for reused in re.findall(r": +(\d+) of", story))
    assert new == beginning == 0
    assert again >= 96
    assert end == again
    assert "after ten others: 0 of" in shown["import asyncio"]
    assert "after the reset: 0 of" in shown['print("after the reset:", await reused(story))']


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_tools_are_called_as_the_example_says(run_example: RunExample) -> None:
    code = run_example("08_tools")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    cards = [
        output.data["text/plain"].splitlines()
        for cell in code
        if cell.source.startswith("%%chat")
        for output in cell.outputs
        if re.match(r"\w+\(", output.get("data", {}).get("text/plain", ""))
    ]
    names = [card[0].partition("(")[0] for card in cards]
    assert names == ["temperature", "parcel", "roll"]
    town = re.fullmatch(r"temperature\(town='(\w+)'\)", cards[0][0])[1]
    degrees = {"Rome": 24, "Oslo": 3, "Cairo": 33}
    assert cards[0][1] == f"It is {degrees[town]} degrees in {town}."
    number = re.fullmatch(r"parcel\(number=(-?\d+)\)", cards[1][0])[1]
    assert cards[1][1] == f"LookupError: there is no parcel {number}"
    assert cards[1][2].startswith("[failed · ")
    assert cards[2][1] == f"The die with {cards[2][0][len('roll(sides=') : -1]} sides shows a 4."
    roles = [line.split()[0] for line in shown["for message in talk.to_openai():"].splitlines()]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert shown["(call,) = talk.turns[0].rounds[0].calls"].startswith("('parcel', True, 'LookupError: ")
    town = re.search(r'"town": "(\w+)"', shown["import json"])[1]
    assert f"-> It is {degrees[town]} degrees in {town}." in shown["import json"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_engine_that_has_more_to_do_than_it_takes_is_watched_as_the_example_says(
    run_example: RunExample,
) -> None:
    code = run_example("10_watching")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    assert shown["answers = await told"] == "(24, True)"
    assert shown["from nbengine import AsyncLLM"] == "(4, True)"
    history = shown["%engine history --last 2m"]
    assert "tokens" in history
    kept = next(text for line, text in shown.items() if line.startswith("%runs"))
    assert "How does a piano work?" in kept


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_openais_client_is_answered_by_the_notebooks_engine_as_the_example_says(
    run_example: RunExample,
) -> None:
    code = run_example("09_server")
    shown = {cell.source.splitlines()[0]: plain(cell) for cell in code}
    served = next(text for line, text in shown.items() if line.startswith("%engine serve --port 0"))
    url = re.search(r"http://127\.0\.0\.1:\d+", served)[0]
    assert shown["from openai import OpenAI"] == "'smollm2-135m'"
    question = next(text for line, text in shown.items() if line.startswith("question = "))
    assert "Paris" in question
    tokens_in, tokens_out = map(int, re.search(r"(\d+) tokens in, (\d+) out", question).groups())
    assert (tokens_in > 20, 0 < tokens_out <= 24) == (True, True)
    streamed = shown["stream = client.chat.completions.create("]
    assert re.search(r"\S+ \S+ \S+.*\n24 tokens$", streamed.strip())
    assert re.fullmatch(r"Review\(mood='(good|bad)', stars=[1-5]\)", shown["from typing import Literal"])
    town, degrees = re.match(r"temperature\('(\w+)'\) -> (\d+)\n", shown["import json"]).groups()
    assert {"Rome": 24, "Oslo": 3, "Cairo": 33}[town] == int(degrees)
    assert len(shown["import asyncio"].splitlines()) == 12
    texts = next(text for line, text in shown.items() if line.startswith("texts = "))
    same, similar, other = (float(line.split()[0]) for line in texts.splitlines())
    assert same == 1 > similar > other
    assert f"at {url}/v1 for this machine only" in shown["%engine status"]
    ended = re.findall(
        r'finished_reason="(?:stop|length)".*} (\d+)', shown["from urllib.request import urlopen"]
    )
    # The engine tells its figures a few times a second, so that the last requests may be missing.
    assert 0 < sum(map(int, ended)) <= 20
    assert shown["%engine serve --stop"].startswith(f"the server at {url} has ended")
    assert "processes are gone" in shown["%engine stop"]
