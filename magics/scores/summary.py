"""Scores by setting: means with their intervals, and differences over the same prompts.

A comparison asks each of its prompts (the elements of `--each`) with each of its settings (the values of the
flags). Answers of the same prompt (`-n`) are no independent draws of prompts: where there are several prompts,
each counts once, with the mean of its answers' scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import mean
from typing import TYPE_CHECKING, Any

from nbengine.magics.scores.intervals import Estimate, of_differences_of_truths, of_numbers, of_truths
from nbengine.magics.scores.table import Score

if TYPE_CHECKING:
    from nbengine.magics.comparison.result import ComparisonResult

Groups = Sequence[Sequence[Score]]
"""Scores with one setting: a group for each prompt, empty where it has none."""


class Experiment:
    """A comparison's answers by setting and by prompt; settings change faster than prompts."""

    def __init__(self, result: ComparisonResult) -> None:
        self._result = result
        names = list(result.axes)[result.num_each :]
        self.num_settings = math.prod(len(result.axes[name]) for name in names)
        self.settings: list[dict[str, Any]] = [
            {name: result.settings[index][name] for name in names} for index in range(self.num_settings)
        ]

    def values(self, name: str, position: int) -> list[Score]:
        """Return the scores of the answers of one result."""
        scores = self._result.scores.values[name]
        places = ((position, answer.index) for answer in self._result.results[position].outputs)
        return [scores[place] for place in places if place in scores]

    def groups(self, name: str, setting: int) -> Groups:
        """Return the scores of one setting, prompt by prompt."""
        positions = range(setting, len(self._result), self.num_settings)
        return [self.values(name, position) for position in positions]

    def differs(self, position: int) -> bool:
        """Return whether any score of a result's prompt is not the same in all settings."""
        first = position - position % self.num_settings
        positions = range(first, first + self.num_settings)
        return any(
            len({tuple(self.values(name, other)) for other in positions}) > 1
            for name in self._result.scores.names
        )

    def estimate(self, name: str, setting: int) -> Estimate:
        """Estimate the mean of a score with one setting."""
        return estimate(self.groups(name, setting), is_truth=self._result.scores.is_truth(name))

    def difference(self, name: str, first: int, second: int) -> Estimate:
        """Estimate how much greater a score is with the second setting, over the prompts that have both."""
        return difference(
            self.groups(name, first),
            self.groups(name, second),
            is_truth=self._result.scores.is_truth(name),
        )


def estimate(groups: Groups, *, is_truth: bool) -> Estimate:
    """Estimate the mean of scores with one setting."""
    known = [group for group in groups if group]
    values = [value for group in known for value in group]
    if len(known) > 1 and len(values) > len(known):
        return of_numbers([float(mean(group)) for group in known])
    if is_truth:
        return of_truths(sum(map(bool, values)), len(values))
    return of_numbers([float(value) for value in values])


def difference(first: Groups, second: Groups, *, is_truth: bool) -> Estimate:
    """Estimate the mean difference, second less first, over the prompts that have both."""
    pairs = [(before, after) for before, after in zip(first, second, strict=True) if before and after]
    if is_truth and all(len(before) == len(after) == 1 for before, after in pairs):
        changes = [after[0] - before[0] for before, after in pairs]
        return of_differences_of_truths(changes.count(1), changes.count(-1), len(changes))
    return of_numbers([float(mean(after)) - float(mean(before)) for before, after in pairs])


def summary_rows(result: ComparisonResult) -> list[dict[str, Any]]:
    """List a row for each setting and score."""
    experiment = Experiment(result)
    return [
        {**settings, "score": name, **asdict(experiment.estimate(name, number))}
        for number, settings in enumerate(experiment.settings)
        for name in result.scores.names
    ]


def difference_rows(result: ComparisonResult) -> list[dict[str, Any]]:
    """List a row for each score and pair of settings."""
    experiment = Experiment(result)
    pairs = list(itertools.combinations(range(experiment.num_settings), 2))
    return [
        {
            "score": name,
            "first": experiment.settings[first],
            "second": experiment.settings[second],
            **asdict(experiment.difference(name, first, second)),
        }
        for name in result.scores.names
        for first, second in pairs
    ]
