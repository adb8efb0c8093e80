"""Scorers, which find a score of an answer: functions of the notebook, and expected values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nbengine.magics.scores.matching import Matcher

if TYPE_CHECKING:
    from nbengine.magics.generation.result import GenerationResult


class Scorer(Protocol):
    """A maker of one score of each answer."""

    @property
    def name(self) -> str:
        """Return the name of the score, which is that of its column."""

    def score(self, position: int, answer: GenerationResult) -> Any:
        """Return the score of an answer of the result at `position`, or an awaitable of it; raise anything."""


@dataclass(frozen=True)
class Row:
    """One combination of a comparison: its settings, and the elements of `--each` by their names."""

    settings: Mapping[str, Any]
    elements: Mapping[str, Any]

    @property
    def fields(self) -> dict[str, Any]:
        """Return the fields of all elements: keys of a dict, columns of a table's row, attributes."""
        found: dict[str, Any] = {}
        for element in self.elements.values():
            found |= fields_of(element)
        return found


@dataclass(frozen=True)
class FunctionScorer:
    """A function of the notebook, which gets a result and the settings of its row, fields included."""

    name: str
    function: Callable[[GenerationResult, dict[str, Any]], Any]
    rows: Sequence[Row]

    def score(self, position: int, answer: GenerationResult) -> Any:
        """Return what the function gives."""
        row = self.rows[position]
        return self.function(answer, {**row.fields, **row.settings})


@dataclass(frozen=True)
class ExpectedScorer:
    """The comparison of each answer with the expected value of its row."""

    name: str
    matchers: Sequence[Matcher]

    def score(self, position: int, answer: GenerationResult) -> bool:
        """Return whether the answer is what its row expects."""
        return self.matchers[position](answer_text(answer))


@dataclass(frozen=True)
class JudgePrompt:
    """The rule for a model that judges answers, and the variables that it may name."""

    text: str
    in_pairs: bool
    """Two answers are compared, instead of one graded."""
    namespace: Mapping[str, object]
    engine: str | None = None
    """The engine that is asked; None: the one that has written the answer."""


@dataclass(frozen=True)
class ScorePlan:
    """All that a line wants to have scored.

    `rows` has the combinations in their order: for each prompt, one with each of the `num_settings` settings.
    """

    scorers: Sequence[Scorer]
    judge: JudgePrompt | None
    rows: Sequence[Row]
    num_settings: int

    @property
    def names(self) -> list[str]:
        """Return the names of the scores, in the order of their columns."""
        return [*(scorer.name for scorer in self.scorers), *([JUDGE] if self.judge is not None else [])]

    def same_prompt(self, position: int) -> range:
        """Return the positions of the prompt of a position, one with each setting."""
        first = position - position % self.num_settings
        return range(first, first + self.num_settings)


JUDGE = "judge"
"""The name of the score that a model gives."""


def answer_text(answer: GenerationResult) -> str:
    """Return the text of the first completion, without its reasoning."""
    return answer.without_reasoning(answer.outputs[0]).text if answer.outputs else ""


def fields_of(element: Any) -> dict[str, Any]:
    """Return the fields of an element of `--each`: keys of a dict, columns of a table's row, attributes."""
    if isinstance(element, tuple) and hasattr(element, "_asdict"):
        element = element._asdict()
    elif hasattr(element, "to_dict") and hasattr(element, "index"):
        element = element.to_dict()  # A row of a table.
    if isinstance(element, Mapping):
        return {key: value for key, value in element.items() if isinstance(key, str)}
    return {} if isinstance(element, type) else dict(getattr(element, "__dict__", {}))
