"""A model as judge: its requests, its grammar, and what becomes of its grades."""

from __future__ import annotations

import asyncio

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import RequestError
from nbengine.magics.extension import Extension
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.scores.judging import judge_request
from nbengine.magics.scores.scorers import JudgePrompt, Row
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import StructuredOutputsParams
from tests.unit.magics.conftest import FakeBackend, FakeClient
from tests.unit.magics.kernel_cells import run, until

SCALE = "\n\nGive one grade from 1 (worst) to 5 (best)."


def answer_of(text: str) -> GenerationResult:
    answer = GenerationResult("1", "the question")
    answer.absorb(RequestOutput("1", None, [1], [CompletionOutput(0, text, [1])], True))
    return answer


@pytest.mark.parametrize(
    ("rule", "request_text"),
    [
        ("Is it {word}?", "Is it kind?\n\nThe prompt:\nthe question\n\nThe answer:\n{word}"),
        ("{{word}} {other}", "{word} {other}\n\nThe prompt:\nthe question\n\nThe answer:\n{word}"),
        ("Q: {prompt} A: {answer} ({tone})", "Q: the question A: {word} (dry)"),
    ],
)
def test_a_rule_has_the_row_s_variables_and_prompt_and_answer(rule: str, request_text: str) -> None:
    prompt = JudgePrompt(rule, {"word": "outer", "answer": "outer", "tone": "dry"})
    row = Row({"word": 0}, {"word": "kind"})
    # What an answer has in braces stays text.
    assert judge_request(prompt, row, answer_of("{word}")) == request_text + SCALE


def test_each_answer_is_graded_by_its_own_engine_with_a_grammar(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    shell.run_cell("%engine start random-tiny --name B").raise_error()
    other = backend.clients["B"]
    engine.turns, other.turns = [["one"], ["2"]], [["two"], [" 5"]]
    line = "--engine random-tiny,B --temperature 0.7 --system Tersely --max-tokens 9 --judge 'Is it short?' -o grid"
    shell.run_cell(f"%%generate {line}\nCount\n").raise_error()
    grid = shell.user_ns["grid"]
    assert [(row["text"], row["judge"]) for row in grid.rows()] == [("one", 2), ("two", 5)]
    for client, text in ((engine, "one"), (other, "two")):
        (_, params), (prompt, judging) = client.requests
        assert params.structured_outputs is None
        assert prompt["prompt"] == (f"<user>Is it short?\n\nThe prompt:\nCount\n\nThe answer:\n{text}{SCALE}")
        assert judging.structured_outputs == StructuredOutputsParams(choice=["1", "2", "3", "4", "5"])
        assert (judging.temperature, judging.n, judging.seed) == (0, 1, None)
        # The engine keeps no transcript of it, and nothing is left under way.
        assert client.labels == ["Count", None]
    ongoing = Extension.loaded[shell].session.ongoing
    assert ongoing.snapshot() == {}
    assert [answer.result.prompt for answer in ongoing.answers.newest_first()] == ["Count", "Count"]


def test_a_judge_that_fails_or_rambles_is_the_error_of_its_answer(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, position = engine.submit, iter(range(9))

    def submit(*args: object, **more: object) -> object:
        number = next(position)
        if number == 3:
            raise RequestError("no grammar here")
        collector = original(*args, **more)  # type: ignore[arg-type]
        if number == 4:
            collector.put_error(RequestError("refused later"))
        return collector

    monkeypatch.setattr(engine, "submit", submit)
    engine.turns = [["a"], ["b"], ["c"], [], ["7"]]
    shell.run_cell("%%generate --seed 1,2,3 --judge good -o grid\nhi\n").raise_error()
    rows = shell.user_ns["grid"].rows()
    assert [row["judge"] for row in rows] == [None] * 3
    assert [row["judge_error"] for row in rows] == [
        "RequestError: no grammar here",
        "RequestError: refused later",
        "IncompleteOutputError: the judge has given no grade from 1 to 5: '7'",
    ]


async def test_an_interrupt_keeps_the_grades_that_have_come_and_ends_the_other_requests(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    cell = asyncio.create_task(run(kernel_shell, "%%generate --seed 1,2,3 --judge good -o grid\nhi\n"))
    await until(lambda: len(engine.collectors) == 3)
    engine.emit("whole", "stop", 0)
    await until(lambda: len(engine.collectors) == 4)
    engine.emit("4", "stop", 3)
    engine.emit("whole", "stop", 1)
    await until(lambda: len(engine.collectors) == 5)
    grid = kernel_shell.user_ns.get("grid") or kernel_shell.user_ns["grid"]
    await until(lambda: grid.scores.values["judge"] == {(0, 0): 4})
    cell.cancel()
    outcome = await cell
    assert isinstance(outcome.error_in_exec, KeyboardInterrupt)
    assert [row["judge"] for row in grid.rows()] == [4, None, None]
    assert engine.aborted == [engine.collectors[index].request_id for index in (2, 4)]
    assert grid.scores.num_open == 0
