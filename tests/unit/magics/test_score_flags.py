"""The flags that score: what they make of a line, and the mistakes that they name before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from IPython.core.error import UsageError

from nbengine.magics.comparison.arguments import ComparisonPlan, parse_request
from nbengine.magics.comparison.result import ComparisonResult
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.scores.flags import ANSWER_COLUMNS
from nbengine.magics.scores.scorers import Row
from nbengine.outputs import CompletionOutput, RequestOutput

CAPITALS = [{"country": "France", "capital": "Paris"}, {"country": "Peru", "capital": "Lima"}]


class Pair(NamedTuple):
    question: str
    answer: int


@dataclass
class Item:
    question: str
    answer: int


class Column:
    """A row of a table, as pandas has it."""

    def __init__(self, **fields: object) -> None:
        self._fields = fields
        self.index = list(fields)

    def to_dict(self) -> dict[str, object]:
        return self._fields


def polite(result: Any, row: Any) -> bool:
    return True


def alone(result: Any) -> bool:
    return True


NAMES: dict[str, object] = {
    "rows": CAPITALS,
    "ragged": [*CAPITALS, {"country": "Chile"}],
    "patterns": [{"country": "France", "capital": "P("}],
    "words": ["a", "b"],
    "polite": polite,
    "alone": alone,
    "shop": SimpleNamespace(cheap=polite),
    "number": 3,
    "rule": "Is it right?",
    "text": polite,
    "seed": polite,
    "polite_error": polite,
}


def parse(line: str, body: str = "{row}\n", **names: object) -> ComparisonPlan:
    return parse_request(line, body, NBEngine(), {**NAMES, **names})


def test_scores_stand_in_the_order_of_the_line() -> None:
    plan = parse(
        "--each row=rows --score polite,shop.cheap --score len --expect capital --judge rule",
        len=lambda result, row: len(result.text),
    )
    assert plan.scores.names == ["polite", "shop.cheap", "len", "capital_matches", "judge"]
    assert plan.scores.judge is not None
    assert plan.scores.judge.text == "Is it right?"
    assert parse("--each row=rows").scores.names == []


def test_the_help_of_chat_has_none_of_them() -> None:
    with pytest.raises(UsageError, match="--score, --expect and --judge need a comparison"):
        parse("--score polite", "hi\n")


@pytest.mark.parametrize(
    "element",
    [
        {"question": "Why?", "answer": 4, 5: "no name"},
        Pair("Why?", 4),
        Item("Why?", 4),
        SimpleNamespace(question="Why?", answer=4),
        Column(question="Why?", answer=4),
    ],
)
def test_the_fields_of_an_element_are_those_of_its_row(element: Any) -> None:
    assert Row({}, {"item": element, "word": "x", "number": 3}).fields == {"question": "Why?", "answer": 4}
    plan = parse("--each item=items --expect answer", "{item}\n", items=[element])
    answer = GenerationResult("1", "hi")
    answer.absorb(RequestOutput("1", None, [1], [CompletionOutput(0, "4", [1])], True))
    (scorer,) = plan.scores.scorers
    assert scorer.score(0, answer) is True


def test_an_element_itself_and_without_each_a_variable_may_be_expected() -> None:
    assert parse("--each words --expect words", "{words}\n").scores.names == ["words_matches"]
    assert parse("--seed 1,2 --expect number", "hi\n").scores.names == ["number_matches"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--score polit", "%%generate: --score polit: there is no variable 'polit'; did you mean polite?"),
        ("--score ''", "--score : there is no variable ''"),
        ("--score polite,,alone", "there is no variable ''"),
        ("--score shop.dear", "--score shop.dear: 'types.SimpleNamespace' object has no attribute 'dear'"),
        ("--score number", "--score number: int is not a function"),
        ("--score alone", "--score alone: it is called with (result, row): too many positional arguments"),
        ("--score text", "the score 'text' would be a column that is there already"),
        ("--score seed --seed 1,2", "the score 'seed' would be a column that is there already"),
        ("--score polite,polite", "the score 'polite' would be a column that is there already"),
        ("--score polite,polite_error", "the score 'polite_error' would be a column that is there already"),
        ("--expect capitol", "the row with row 0 has no column 'capitol'; did you mean capital?"),
        ("--expect number", "has no column 'number'"),
        ("--match regex", "--match says how --expect compares, and there is no --expect"),
        ("--expect capital --match like", "invalid choice: 'like'"),
        (
            "--expect capital --match json",
            "in the row with row 0, the expected value must be a dict of fields",
        ),
        ("--judge ' '", "--judge: the prompt is empty"),
        ("--judge-engine B", "--judge-engine says which model judges, and there is no --judge"),
        ("--pairwise", "--pairwise says how --judge judges, and there is no --judge"),
        ("--judge rule --pairwise", "--pairwise compares settings: it needs several values of a flag"),
        (
            "--seed 1,2,3,4,5,6 -n 200 --judge rule --pairwise",
            "--pairwise asks 12000 questions, more than 10000 (`%config NBEngine.max_answers` allows more)",
        ),
    ],
)
def test_a_mistake_is_one_line_that_names_it(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(f"--each row=rows {line}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_row_with_a_missing_or_wrong_value_is_named() -> None:
    with pytest.raises(UsageError, match=r"the row with row 2 has no column 'capital'"):
        parse("--each row=ragged --expect capital")
    with pytest.raises(UsageError, match=r"--match regex: in the row with row 0, .* got 'P\('"):
        parse("--each row=patterns --expect capital --match regex")
    with pytest.raises(UsageError, match="the notebook has no variable 'numbre'; did you mean number"):
        parse("--seed 1,2 --expect numbre", "hi\n")


def test_the_columns_that_no_score_can_be_called_are_those_of_an_answer() -> None:
    answers = [GenerationResult(str(index), "hi") for index in range(2)]
    completions = [CompletionOutput(index, "4", [1], cumulative_logprob=-0.5) for index in range(2)]
    answers[0].absorb(RequestOutput("1", None, [1], completions, True))
    comparison = ComparisonResult([], [{}, {}], answers)
    comparison.errors[1] = UsageError("no")  # type: ignore[assignment]
    assert set(comparison.rows()[0]) == set(ANSWER_COLUMNS)
