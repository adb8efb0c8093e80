"""This module turns a line of `%%generate` into the requests that it stands for, several if it has lists."""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from IPython.core.error import UsageError

from nbengine.frontend.text.interpolate import interpolate
from nbengine.magics.arguments import values_of
from nbengine.magics.comparison.axes import (
    EACH,
    RAISE_LIMIT,
    Axis,
    Choice,
    Several,
    bindings_of,
    each_axis,
    flag_axis,
)
from nbengine.magics.config import NBEngine
from nbengine.magics.generation.arguments import (
    Expand,
    GenerateLine,
    GenerateOptions,
    options_of,
    read_line,
)
from nbengine.magics.kept_prompts.calls import FindPrompt, no_prompt
from nbengine.magics.scores.flags import score_plan
from nbengine.magics.scores.scorers import Row, ScorePlan
from nbengine.sampling_params import SamplingParams

VARIED_FLAGS = ("system", "temperature", "top_p", "top_k", "min_p", "max_tokens", "thinking_budget", "seed")
"""Flags that take a list, outermost first; those of `--set` and the engines follow them."""
RETRIES = 2
"""The number of times that a request is sent again which an engine core has lost."""
_LIST_PARAMETERS = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")
"""Parameters whose value is a list: only a list of lists gives them several values."""


@dataclass(frozen=True)
class Combination:
    """One request, and the values that distinguish it in a comparison, by the name of their axis."""

    settings: dict[str, Any]
    options: GenerateOptions


@dataclass(frozen=True)
class ComparisonPlan:
    """All combinations of the axes' values: the last axis changes fastest, those of `--each` come first.

    Without axes there is one combination, which asks for one request.
    """

    axes: tuple[Axis, ...]
    num_each: int
    """The number of axes that come from `--each`."""
    combinations: tuple[Combination, ...]
    scores: ScorePlan
    resumes: bool = False
    """Only what no kept run has answered is asked."""
    retries: int = RETRIES

    @property
    def options(self) -> GenerateOptions:
        """Return the options that all requests share: where the result goes and how it is shown."""
        return self.combinations[0].options


class _Expansion:
    """A callable that puts the variables of a namespace into texts; each row brings its own namespace."""

    def __init__(self, namespace: Mapping[str, object]) -> None:
        self.namespace = namespace

    def __call__(self, text: str) -> str:
        return interpolate(text, self.namespace)


def parse_request(
    line: str,
    body: str | None,
    config: NBEngine,
    namespace: Mapping[str, object],
    find_prompt: FindPrompt = no_prompt,
) -> ComparisonPlan:
    """Read a line, and a cell's body if there is one: what it asks for, in one request or in several.

    `find_prompt` finds the kept prompts that `@NAME` means.

    Raises:
        UsageError: the line cannot be understood, or asks for too many answers.
        HelpRequested: `-h` was given.
    """
    return plan_of(lambda expand: read_line(line, body, expand, find_prompt), config, namespace)


def plan_of(
    read: Callable[[Expand], GenerateLine], config: NBEngine, namespace: Mapping[str, object]
) -> ComparisonPlan:
    """Return the requests that a line asks for; `read` splits it, given what puts variables into its parts.

    Raises:
        UsageError: the line cannot be understood, or asks for too many answers.
        HelpRequested: `-h` was given.
    """
    expand = _Expansion(namespace)
    given = read(expand)
    prog = given.prog
    specs = values_of("--each", given.words, given.parser)
    each = [each_axis(spec, namespace, prog, config.max_answers) for spec in specs]
    axes: list[Axis] | None = None
    combinations: list[Combination] = []
    rows: list[Row] = []
    used: set[str] = set()
    parsed: argparse.Namespace | None = None
    depends = any("{" in word for word in given.words)
    for row in itertools.product(*(axis.choices for axis in each)):
        bindings = expand.namespace = bindings_of(each, row, namespace)
        elements = {axis.name: choice.value for axis, choice in zip(each, row, strict=True)}
        filled = None if given.call is None else given.call.fill(bindings, elements, expand)
        # Reading the flags takes longer than all else, and a line without variables says the same each time.
        if parsed is None or depends:
            parsed = given.parser.parse_words(given.words)
        varied = _flag_axes(parsed, prog)
        if axes is None:
            axes = _checked([*each, *varied], parsed.n or 1, config.max_answers, prog)
        elif axes[len(each) :] != varied:
            raise UsageError(f"{prog}: the lists in flags must be the same for each element of --each")
        for choices in itertools.product(*(axis.choices for axis in varied)):
            chosen = _with_values(parsed, varied, choices)
            options = options_of(given, chosen, config, expand, bindings, filled)
            combinations.append(Combination(_settings(axes, (*row, *choices)), options))
            rows.append(Row(combinations[-1].settings, elements))
        used |= bindings.used
    assert parsed is not None, "an axis has at least one value"
    _check_use(each, used, prog)
    scores = score_plan(parsed, rows, axes or (), namespace, prog, config.max_answers)
    if not axes and (parsed.resume or parsed.retries is not None):
        flag = "--resume" if parsed.resume else "--retries"
        raise UsageError(f"{prog}: {flag} is for comparisons: the line has neither --each nor a list")
    retries = RETRIES if parsed.retries is None else parsed.retries
    if retries < 0:
        raise UsageError(f"{prog}: --retries must be at least 0, got {retries}")
    return ComparisonPlan(
        tuple(axes or ()), len(each), tuple(combinations), scores, resumes=parsed.resume, retries=retries
    )


def _flag_axes(parsed: argparse.Namespace, prog: str) -> list[Axis]:
    axes = [
        flag_axis("--" + name.replace("_", "-"), name, value, prog)
        for name in VARIED_FLAGS
        if isinstance(value := getattr(parsed, name), Several)
    ]
    for name, value in dict(parsed.set).items():
        if name in SamplingParams.__struct_fields__ and _is_several(name, value):
            if name in ("n", "logprobs", "structured_outputs"):
                raise UsageError(f"{prog}: --set {name} takes one value, which all requests share")
            axes.append(flag_axis(f"--set {name}", name, Several(value), prog))
    if isinstance(parsed.engine, Several):
        axes.append(flag_axis("--engine", "engine", parsed.engine, prog))
    return axes


def _is_several(name: str, value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return name not in _LIST_PARAMETERS or all(isinstance(item, list) for item in value)


def _checked(axes: list[Axis], n: int, limit: int, prog: str) -> list[Axis]:
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{prog}: two lists are called {name!r}: --each NAME=… gives another name")
    total = n
    for axis in axes:
        total *= len(axis.choices)
    if axes and total > limit:
        sizes = [f"{len(axis.choices)} × {axis.name}" for axis in axes] + ([f"-n {n}"] if n > 1 else [])
        raise UsageError(f"{prog}: {total} answers ({', '.join(sizes)}), more than {limit}{RAISE_LIMIT}")
    return axes


def _with_values(
    parsed: argparse.Namespace, axes: Sequence[Axis], choices: Sequence[Choice]
) -> argparse.Namespace:
    chosen = copy.copy(parsed)
    values = {axis.name: choice.value for axis, choice in zip(axes, choices, strict=True)}
    chosen.set = [(name, values.pop(name, value)) for name, value in dict(parsed.set).items()]
    for name, value in values.items():
        setattr(chosen, name, value)
    return chosen


def _settings(axes: Sequence[Axis], choices: Sequence[Choice]) -> dict[str, Any]:
    return {axis.name: choice.setting for axis, choice in zip(axes, choices, strict=True)}


def _check_use(each: Sequence[Axis], used: set[str], prog: str) -> None:
    for axis in each:
        if axis.name not in used and not (len(each) == 1 and EACH in used):
            raise UsageError(f"{prog}: --each: neither the prompt nor a flag names {{{axis.name}}}")
