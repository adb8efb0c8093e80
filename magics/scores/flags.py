"""`--score`, `--expect` and `--judge` say how good the answers of a comparison are."""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from IPython.core.error import UsageError

from nbengine.errors import InvalidArgumentError, did_you_mean
from nbengine.magics.comparison.axes import RAISE_LIMIT, Axis
from nbengine.magics.namespace import named_value
from nbengine.magics.scores.matching import MATCHERS, matcher_of
from nbengine.magics.scores.scorers import ExpectedScorer, FunctionScorer, JudgePrompt, Row, ScorePlan
from nbengine.magics.scores.table import error_column

ANSWER_COLUMNS = (
    "sample",
    "text",
    "finish_reason",
    "tokens",
    "ttft",
    "tokens_per_second",
    "prompt_tokens",
    "cached_tokens",
    "logprob",
    "error",
)
"""The columns that an answer's row may have besides its settings and its scores."""
_LABEL_CHARACTERS = 60


def add_score_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that score the answers of a comparison."""
    add = parser.add_argument
    add(
        "--score",
        metavar="NAME",
        action="append",
        default=[],
        help="score each answer of a comparison with a function of the notebook: NAME(result, row) gives a truth value "
        "or a number (repeatable, or with commas between names)",
    )
    add(
        "--expect",
        metavar="COLUMN",
        action="append",
        default=[],
        help="compare each answer with a field of its --each element, or with the element: the score COLUMN_matches "
        "(repeatable)",
    )
    add(
        "--match",
        metavar="HOW",
        choices=tuple(MATCHERS),
        help="how --expect compares: exact (default), normalised (without case, white space, quotation marks and "
        "final punctuation), regex (found anywhere in the answer), json (all fields of a dict)",
    )
    add(
        "--judge",
        metavar="PROMPT",
        help="let a model grade each answer from 1 (worst) to 5 (best) by this rule, or by the variable of that name; "
        "{prompt}, {answer} and the row's variables may stand in it",
    )
    add(
        "--judge-engine",
        metavar="ENGINE",
        help="the engine of the notebook whose model judges (default: the one that has written the answer)",
    )
    add(
        "--pairwise",
        action="store_true",
        help="let --judge say instead which of two settings has the better answer, asked twice with the answers swapped: "
        "the share of wins, ties half ({answer_a} and {answer_b} may stand in PROMPT)",
    )


def score_plan(
    parsed: argparse.Namespace,
    rows: Sequence[Row],
    axes: Sequence[Axis],
    namespace: Mapping[str, object],
    prog: str,
    limit: int,
) -> ScorePlan:
    """Return what the flags want to have scored of the combinations `rows`, which differ along `axes`.

    A judge may compare pairs at most `limit` times.

    Raises:
        UsageError: a function or a column is missing, an expected value is not possible, two columns would have
            the same name, nothing is compared, or too much is.
    """
    if parsed.match is not None and not parsed.expect:
        raise UsageError(f"{prog}: --match says how --expect compares, and there is no --expect")
    names = [name.strip() for text in parsed.score for name in text.split(",")]
    scorers = [FunctionScorer(name, _function(name, namespace, prog), rows) for name in names]
    match = parsed.match or "exact"
    expected = [_expected(column, match, rows, namespace, prog) for column in parsed.expect]
    if parsed.pairwise and parsed.judge is None:
        raise UsageError(f"{prog}: --pairwise says how --judge judges, and there is no --judge")
    if parsed.judge_engine is not None and parsed.judge is None:
        raise UsageError(f"{prog}: --judge-engine says which model judges, and there is no --judge")
    judge = None if parsed.judge is None else _judge_prompt(parsed, namespace, prog)
    num_settings = math.prod(len(axis.choices) for axis in axes if axis.name not in rows[0].elements)
    plan = ScorePlan((*scorers, *expected), judge, rows, num_settings)
    if plan.names and not axes:
        raise UsageError(
            f"{prog}: --score, --expect and --judge need a comparison: several values of a flag, or --each"
        )
    _check_names(plan.names, [axis.name for axis in axes], prog)
    if parsed.pairwise:
        _check_pairs(len(rows) * (num_settings - 1) * (parsed.n or 1), limit, prog)
    return plan


def _function(name: str, namespace: Mapping[str, object], prog: str) -> Callable[..., Any]:
    function = named_value(name, namespace, f"{prog}: --score")
    if not callable(function):
        raise UsageError(f"{prog}: --score {name}: {type(function).__name__} is not a function")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return function  # Functions that are written in C may have no signature.
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise UsageError(f"{prog}: --score {name}: it is called with (result, row): {error}") from None
    return function


def _expected(
    column: str, match: str, rows: Sequence[Row], namespace: Mapping[str, object], prog: str
) -> ExpectedScorer:
    matchers = []
    for row in rows:
        values = {**row.fields, **row.elements} if row.elements else namespace
        if column not in values:
            place = f"the row with {_label(row)}" if row.elements else "the notebook"
            kind = "column" if row.elements else "variable"
            raise UsageError(
                f"{prog}: --expect {column}: {place} has no {kind} {column!r}{did_you_mean(column, values)}"
            )
        try:
            matchers.append(matcher_of(match, values[column]))
        except InvalidArgumentError as error:
            place = f"in the row with {_label(row)}, " if row.elements else ""
            raise UsageError(f"{prog}: --expect {column} --match {match}: {place}{error}") from None
    return ExpectedScorer(f"{column}_matches", matchers)


def _judge_prompt(parsed: argparse.Namespace, namespace: Mapping[str, object], prog: str) -> JudgePrompt:
    text: str = parsed.judge
    if text.isidentifier() and isinstance(value := namespace.get(text), str):
        text = value
    if not text.strip():
        raise UsageError(f"{prog}: --judge: the prompt is empty")
    return JudgePrompt(text, parsed.pairwise, namespace, parsed.judge_engine)


def _check_pairs(num_questions: int, limit: int, prog: str) -> None:
    if num_questions == 0:
        raise UsageError(f"{prog}: --pairwise compares settings: it needs several values of a flag")
    if num_questions > limit:
        raise UsageError(f"{prog}: --pairwise asks {num_questions} questions, more than {limit}{RAISE_LIMIT}")


def _check_names(names: Sequence[str], axes: Sequence[str], prog: str) -> None:
    taken = [*ANSWER_COLUMNS, *axes]
    for name in names:
        if name in taken:
            raise UsageError(f"{prog}: the score {name!r} would be a column that is there already")
        taken += [name, error_column(name)]


def _label(row: Row) -> str:
    label = ", ".join(f"{name} {row.settings[name]!r}" for name in row.elements)
    return label if len(label) <= _LABEL_CHARACTERS else f"{label[:_LABEL_CHARACTERS]}…"
