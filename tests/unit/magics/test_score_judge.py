"""A model as judge: its requests, its grammar, and what becomes of its grades."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbengine
from nbengine.errors import RequestError
from nbengine.magics.extension import Extension
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.scores.asking import Questions
from nbengine.magics.scores.judging import grade_request, pair_request
from nbengine.magics.scores.scorers import JudgePrompt, Row
from nbengine.magics.scores.table import Scores
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import StructuredOutputsParams
from tests.unit.magics.conftest import FakeBackend, FakeClient
from tests.unit.magics.kernel_cells import run, until

WHICH = "\n\nWhich answer is better, A or B?"
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
    prompt = JudgePrompt(rule, False, {"word": "outer", "answer": "outer", "tone": "dry"})
    row = Row({"word": 0}, {"word": "kind"})
    # What an answer has in braces stays text.
    assert grade_request(prompt, row, answer_of("{word}")) == request_text + SCALE


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
    # It is none of the user's prompts, and no run.
    assert sorted(row["text"] for row in nbengine.runs().rows()) == ["one", "two"]
    ongoing = Extension.loaded[shell].session.ongoing
    assert ongoing.snapshot() == {}
    assert [answer.result.prompt for answer in ongoing.answers.newest_first()] == ["Count", "Count"]


def test_another_engine_judges_as_its_model_wants_to_be_asked(
    shell: InteractiveShell, engine: FakeClient, backend: FakeBackend
) -> None:
    shell.run_cell("%engine start random-tiny --name B").raise_error()
    other = backend.clients["B"]
    engine.turns, other.turns = [["one"], ["two"]], [["2"], ["5"]]
    line = "--engine random-tiny --raw -t 0 --seed 1,2 --judge 'Is it short?' --judge-engine B -o grid"
    shell.run_cell(f"%%generate {line}\nCount\n").raise_error()
    assert [(row["text"], row["judge"]) for row in shell.user_ns["grid"].rows()] == [("one", 2), ("two", 5)]
    assert [prompt for prompt, _ in engine.requests] == ["Count", "Count"]
    prompts = [prompt["prompt"] for prompt, _ in other.requests]
    assert prompts == [
        f"<user>Is it short?\n\nThe prompt:\nCount\n\nThe answer:\n{text}{SCALE}" for text in ("one", "two")
    ]
    # Nothing is sent where there is no such engine.
    unknown = shell.run_cell(f"%%generate {line.replace('-engine B', '-engine C')}\nCount\n")
    assert "C" in str(unknown.error_in_exec)
    assert len(engine.requests) == 2


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
        "IncompleteOutputError: the judge has answered none of 1, 2, 3, 4, 5: '7'",
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


def test_a_rule_for_pairs_has_both_answers() -> None:
    prompt = JudgePrompt("Which is {word}?", True, {"word": "kind"})
    first, second = answer_of("yes"), answer_of("{word}")
    assert pair_request(prompt, Row({}, {}), first, second) == (
        "Which is kind?\n\nThe prompt:\nthe question\n\nAnswer A:\nyes\n\nAnswer B:\n{word}" + WHICH
    )
    own = JudgePrompt("{answer_b} or {answer_a}", True, {})
    assert pair_request(own, Row({}, {}), first, second) == "{word} or yes" + WHICH


def test_settings_are_compared_twice_with_the_answers_swapped(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    # For each prompt three settings: the judge always prefers "best", and takes answer A of two others.
    answers = ["best", "one", "two"]
    engine.turns = [[text] for text in answers * 2]
    original = engine.submit

    def submit(prompt: Any, *args: Any, **more: Any) -> Any:
        if WHICH in prompt["prompt"]:
            shown = re.findall(r"Answer ([AB]):\n(\w+)", prompt["prompt"])
            engine.turns.insert(0, [next((side for side, text in shown if text == "best"), "A")])
        return original(prompt, *args, **more)

    engine.submit = submit  # type: ignore[method-assign]
    shell.run_cell(
        "%%generate --each w=x,y --seed 1,2,3 --judge better --pairwise -o grid\n{w}\n"
    ).raise_error()
    grid = shell.user_ns["grid"]
    assert [(row["text"], row["judge"]) for row in grid.rows()] == [
        ("best", 1.0),
        ("one", 0.25),
        ("two", 0.25),
    ] * 2
    assert len(engine.requests) == 6 + 2 * 6
    questions = [prompt["prompt"] for prompt, _ in engine.requests if WHICH in prompt["prompt"]]
    assert len(set(questions)) == 12
    assert engine.requests[-1][1].structured_outputs == StructuredOutputsParams(choice=["A", "B"])
    assert [(row["mean"], row["n"]) for row in grid.differences()] == [(-0.75, 2), (-0.75, 2), (0.0, 2)]


def test_an_answer_without_rivals_and_one_whose_judge_fails_have_errors(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, position = engine.submit, iter(range(99))

    def submit(*args: Any, **more: Any) -> Any:
        number = next(position)
        if number in (1, 5):
            raise RequestError(f"request {number} is refused")
        return original(*args, **more)

    monkeypatch.setattr(engine, "submit", submit)
    engine.turns = [["a"], ["c"], ["d"], ["A"]]
    line = "%%generate --each w=x,y --seed 1,2 --judge better --pairwise -o grid"
    shell.run_cell(f"{line}\n{{w}}\n").raise_error()
    assert [row["judge_error"] for row in shell.user_ns["grid"].rows()] == [
        "NBEngineError: no other setting has an answer to this prompt",
        None,
        "RequestError: request 5 is refused",
        "RequestError: request 5 is refused",
    ]


async def test_an_interrupt_of_a_judge_of_pairs_ends_its_requests(
    kernel_shell: InteractiveShell, engine: FakeClient
) -> None:
    engine.words = None
    line = "%%generate --seed 1,2,3 --judge good --pairwise -o grid"
    cell = asyncio.create_task(run(kernel_shell, f"{line}\nhi\n"))
    await until(lambda: len(engine.collectors) == 3)
    engine.emit("one", "stop", 0)
    engine.emit("two", "stop", 1)
    await until(lambda: len(engine.collectors) == 5)
    engine.emit("A", "stop", 3)
    cell.cancel()
    assert isinstance((await cell).error_in_exec, KeyboardInterrupt)
    assert [row["judge"] for row in kernel_shell.user_ns["grid"].rows()] == [None] * 3
    assert engine.collectors[2].request_id in engine.aborted
    assert engine.collectors[4].request_id in engine.aborted


def test_questions_are_aborted_though_another_thread_ends_them_meanwhile() -> None:
    questions: Questions[int] = Questions(["A", "B"], [], [], None, Scores())  # type: ignore[arg-type]
    aborted: list[int] = []

    def asked(number: int) -> Any:
        def abort() -> None:
            aborted.append(number)
            questions.end()

        return SimpleNamespace(abort=abort, stop=bool, end=lambda shown: None)

    questions._pending = {number: asked(number) for number in range(3)}
    questions.abort()
    assert aborted == [0, 1, 2]
