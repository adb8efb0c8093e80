"""Answers are scored while others are written: functions and expected values, in rows, means and what is printed."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import InvalidTypeError, RequestError
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.scores.table import score_of
from tests.unit.magics.conftest import FakeClient

Capture = pytest.CaptureFixture[str]
CAPITALS = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]


def run(shell: InteractiveShell, cell: str) -> ComparisonResult:
    shell.run_cell(cell).raise_error()
    result = shell.user_ns["_"]
    assert isinstance(result, ComparisonResult)
    return result


def test_a_function_gets_the_result_and_the_settings_of_its_row_with_its_fields(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    calls: list[tuple[Any, dict[str, Any]]] = []

    def length(result: GenerationResult, row: dict[str, Any]) -> int:
        calls.append((result, dict(row)))
        row.clear()
        return len(result.text) + calls.index((result, calls[-1][1]))

    shell.user_ns.update(length=length, items=CAPITALS)
    result = run(shell, "%%generate --each item=items --temperature 0,1 --score length\n{item}\n")
    assert [row for _, row in calls] == [
        {"item": item, "temperature": temperature, **CAPITALS[item]}
        for item in (0, 1)
        for temperature in (0.0, 1.0)
    ]
    assert [answer for answer, _ in calls] == result.results
    assert [row["length"] for row in result.rows()] == [11, 12, 13, 14]
    assert list(result.rows()[0])[-1] == "length"


def test_means_stand_by_setting_and_differences_are_those_of_the_same_prompts(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.user_ns["items"] = [{"n": 1}, {"n": 5}, {"n": 9}]
    shell.run_cell("def value(result, row):\n    return row['n'] + 2 * row['temperature']")
    shell.run_cell("def warm(result, row):\n    return row['temperature'] > 0")
    result = run(shell, "%%generate --each item=items --temperature 0,1 --score value --score warm\n{item}\n")
    # Student's quantile for two degrees of freedom, and the deviation of 1, 5 and 9.
    half = 0.95 * (2 / (1 - 0.95**2)) ** 0.5 * 4 / 3**0.5
    assert result.summary() == [
        {"temperature": 0.0, "score": "value", "mean": 5, "low": pytest.approx(5 - half), "high": pytest.approx(5 + half), "n": 3},
        {"temperature": 0.0, "score": "warm", "mean": 0, "low": 0, "high": pytest.approx(0.5615, abs=1e-4), "n": 3},
        {"temperature": 1.0, "score": "value", "mean": 7, "low": pytest.approx(7 - half), "high": pytest.approx(7 + half), "n": 3},
        {"temperature": 1.0, "score": "warm", "mean": 1, "low": pytest.approx(0.4385, abs=1e-4), "high": 1, "n": 3},
    ]  # fmt: skip
    value, warm = result.differences()
    both = {"first": {"temperature": 0.0}, "second": {"temperature": 1.0}, "n": 3}
    assert value == {"score": "value", "mean": 2.0, "low": 2.0, "high": 2.0, **both}
    assert (warm["mean"], warm["high"], warm["first"]) == (1.0, 1.0, {"temperature": 0.0})
    printed = capsys.readouterr().out
    assert "── item 1 · temperature 1 ──\nHello world\n[value: 7 · warm: yes]\n[3 tokens" in printed
    assert "temperature 1  7 (-2.94 to 16.9), n 3  100 % (44 to 100 %), n 3\n" in printed
    low = 100 * warm["low"]
    assert f"temperature 1          +2 (2 to 2), n 3  +100 points ({low:.0f} to 100), n 3\n" in printed


def test_the_settings_are_those_of_flags_and_prompts_those_of_each(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell("def one(result, row):\n    return 1")
    prompts = run(shell, "%%generate --each a=x,y --each b=x,y --score one\n{a}{b}\n")
    assert [(row["score"], row["n"]) for row in prompts.summary()] == [("one", 4)]
    assert prompts.differences() == []
    assert "against" not in capsys.readouterr().out
    settings = run(shell, "%%generate --seed 1,2 --top-k 3,4 --score one -n 3\nhi\n")
    assert [(row["seed"], row["top_k"], row["n"]) for row in settings.summary()] == [
        (seed, top_k, 3) for top_k in (3, 4) for seed in (1, 2)
    ]
    assert len(settings.differences()) == 6
    printed = capsys.readouterr().out.partition("against top_k 3 · seed 1")[2].splitlines()
    assert [line.split("  ")[0] for line in printed[1:4]] == [
        "top_k 3 · seed 2",
        "top_k 4 · seed 1",
        "top_k 4 · seed 2",
    ]
    assert run(shell, "%%generate --seed 1,2\nhi\n").summary() == []


def test_each_of_several_answers_is_scored_alone(shell: InteractiveShell, engine: FakeClient) -> None:
    seen: list[GenerationResult] = []

    def number(result: GenerationResult, row: dict[str, Any]) -> int:
        seen.append(result)
        return len(seen)

    shell.user_ns["number"] = number
    result = run(shell, "%%generate --seed 1,2 -n 2 --score number\nhi\n")
    assert [(row["sample"], row["number"]) for row in result.rows()] == [(0, 1), (1, 2), (0, 3), (1, 4)]
    assert [(answer.text, len(answer.outputs)) for answer in seen] == [("Hello world", 1)] * 4


def test_what_is_no_score_is_the_error_of_its_answer_alone(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.run_cell(
        "def odd(result, row):\n    return {1: True, 2: 'yes', 3: None, 4: float('nan'), 5: 1 / (row['seed'] - 5) if row['seed'] == 5 else 0}[row['seed']]"
    )
    shell.run_cell("def leaves(result, row):\n    raise SystemExit(3)")
    result = run(shell, "%%generate --seed 1,2,3,4 --score odd,leaves\nhi\n")
    rows = result.rows()
    assert [row["odd"] for row in rows] == [True, None, None, None]
    assert [row["odd_error"] for row in rows][:2] == [
        None,
        "InvalidTypeError: the value of odd(result, row) must be a truth value or a finite number, got 'yes'",
    ]
    assert {row["leaves_error"] for row in rows} == {"SystemExit: 3"}
    assert [row["text"] for row in rows] == ["Hello world"] * 4
    printed = capsys.readouterr().out
    assert "[odd: failed, InvalidTypeError: the value of odd(result, row) must be" in printed
    assert "none, 1 failed" in printed
    assert [row["n"] for row in result.summary()][::2] == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("value", "score"),
    [
        (True, True),
        (np.bool_(False), False),
        (3, 3),
        (np.float32(0.5), 0.5),
        (Fraction(1, 4), 0.25),
        (-1e300, -1e300),
    ],
)
def test_numbers_and_truth_values_of_any_kind_are_scores(value: object, score: float) -> None:
    found = score_of(value, "f")
    assert found == score
    assert type(found) is type(score)


@pytest.mark.parametrize("value", ["1", None, [1], float("inf"), np.array([1]), 1j, 10**400, object()])
def test_anything_else_is_none(value: object) -> None:
    with pytest.raises(
        InvalidTypeError, match=r"the value of f\(result, row\) must be a truth value or a fin"
    ):
        score_of(value, "f")


def test_async_functions_wait_beside_each_other(shell: InteractiveShell, engine: FakeClient) -> None:
    arrived: list[int] = []

    async def together(result: GenerationResult, row: dict[str, Any]) -> int:
        arrived.append(row["seed"])
        async with asyncio.timeout(60):
            while len(arrived) < 3:
                await asyncio.sleep(0)
        if row["seed"] == 2:
            raise ValueError("two")
        return row["seed"] * 2

    shell.user_ns["together"] = together
    result = run(shell, "%%generate --seed 1,2,3 --score together\nhi\n")
    assert [row["together"] for row in result.rows()] == [2, None, 6]
    assert result.rows()[1]["together_error"] == "ValueError: two"


def test_expected_values_are_compared_with_answers(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.turns = [["**Paris**."], ["Lima"], ["Rome"]]
    shell.user_ns["items"] = [*CAPITALS, {"country": "Chile", "capital": "Santiago"}]
    result = run(
        shell, '%%generate --each item=items --expect capital --match normalised\n{item["country"]}\n'
    )
    assert [row["capital_matches"] for row in result.rows()] == [True, True, False]
    assert result.summary()[0]["mean"] == pytest.approx(2 / 3)


def test_a_bad_pattern_is_refused_before_anything_is_sent(
    shell: InteractiveShell, engine: FakeClient, capsys: Capture
) -> None:
    shell.user_ns["pattern"] = "("
    outcome = shell.run_cell("%%generate --seed 1,2 --expect pattern --match regex\nhi\n")
    assert not outcome.success
    assert "a regular expression (missing ) at position 1), got '('" in capsys.readouterr().err
    assert engine.requests == []


def test_the_reasoning_before_an_answer_is_no_part_of_it(shell: InteractiveShell, engine: FakeClient) -> None:
    engine.thinks = "always"
    engine.words = ["Paris or Lima?", "</think>\n\n", "Lima"]
    shell.user_ns["capital"] = "Lima"
    result = run(shell, "%%generate --seed 1,2 --expect capital\nhi\n")
    assert [row["capital_matches"] for row in result.rows()] == [True, True]


def test_requests_that_failed_and_answers_that_were_ended_have_no_score(
    shell: InteractiveShell, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, position = engine.submit, iter(range(9))

    def submit(*args: Any, **more: Any) -> Any:
        number = next(position)
        if number == 1:
            raise RequestError("too long")
        collector = original(*args, **more)
        if number == 2:
            engine.emit("half", "abort")
        return collector

    shell.run_cell("def one(result, row):\n    return 1")
    monkeypatch.setattr(engine, "submit", submit)
    engine.turns = [["whole"], []]
    result = run(shell, "%%generate --seed 1,2,3 --score one\nhi\n")
    assert [(row["text"], row["one"]) for row in result.rows()] == [("whole", 1), ("", None), ("half", None)]


def test_scores_are_data(shell: InteractiveShell, engine: FakeClient) -> None:
    shell.run_cell("def one(result, row):\n    return row['seed']")
    result = run(shell, "%%generate --seed 1,2 --score one\nhi\n")
    for other in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        assert other.rows() == result.rows()
        assert other.summary() == result.summary()


def test_a_handle_waits_for_the_scores_and_leaves_those_that_do_not_come(
    shell: InteractiveShell, engine: FakeClient
) -> None:
    held, begun = threading.Event(), threading.Event()
    called: list[int] = []
    threads: list[threading.Thread] = []

    def slow(result: GenerationResult, row: dict[str, Any]) -> int:
        called.append(row["seed"])
        threads.append(threading.current_thread())
        if row["seed"] == 2:
            begun.set()
            held.wait(60)
        return row["seed"]

    shell.user_ns["slow"] = slow
    shell.run_cell("%%generate -a -o later --seed 1,2,3 --score slow\nhi\n").raise_error()
    handle = shell.user_ns["later"]
    assert isinstance(handle, ComparisonHandle)
    assert begun.wait(60)
    with pytest.raises(TimeoutError):
        handle.result(0)
    handle.cancel()
    result = handle.result(60)
    held.set()
    threads[0].join(60)
    assert called == [1, 2]
    assert result.finished
    assert [row["slow"] for row in result.rows()] == [1, None, None]
    assert result.summary()[0]["n"] == 1
