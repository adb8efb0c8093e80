"""The conditions of `%engine watch`, and when their coming true is told: state machines without I/O."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nbengine.errors import InvalidArgumentError, did_you_mean
from nbengine.metrics.history import FIGURES, HistoryRow, MetricsHistory

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_NUMBER = r"-?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:e[+-]?\d{1,2})?"
_CONDITION = re.compile(
    rf"\s*(?P<column>\w{{1,100}})\s*(?P<operator>>=|<=|>|<)\s*(?P<number>{_NUMBER})\s*", re.IGNORECASE
)
_FIRST_WORD = re.compile(r"\s*(\w{1,100})")


@dataclass(frozen=True, slots=True)
class Condition:
    """A column of the history against a number."""

    column: str
    operator: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `COLUMN OPERATOR NUMBER`, as in "ttft_p95 > 0.5".

        Raises:
            InvalidArgumentError: it is something else, or there is no such column.
        """
        match = _CONDITION.fullmatch(text)
        first = _FIRST_WORD.match(text)
        column = first[1] if first else ""
        if column and column not in FIGURES:
            hint = did_you_mean(column, FIGURES) or f"; there are {', '.join(FIGURES)}"
            raise InvalidArgumentError(
                "condition", text, f"about a column of the history: {column!r} is none{hint}"
            )
        if match is None:
            raise InvalidArgumentError(
                "condition", text, "COLUMN, one of > >= < <=, and a number: ttft_p95 > 0.5"
            )
        return cls(column, match["operator"], float(match["number"]))

    def holds(self, row: HistoryRow) -> bool | None:
        """Tell whether a row fulfils it; None if the row has no value in the column."""
        value = self.value(row)
        return None if value is None else OPERATORS[self.operator](value, self.number)

    def value(self, row: HistoryRow) -> float | None:
        """Return a row's value in the column."""
        found: float | None = row.as_dict()[self.column]
        return found

    def __str__(self) -> str:
        return f"{self.column} {self.operator} {self.number:g}"


@dataclass(frozen=True, slots=True)
class Change:
    """A condition that has become true or false."""

    is_true: bool
    row: HistoryRow | None
    """The row that has changed it; None: the engine core for which it was true is gone."""


class ConditionWatch:
    """The truth of a condition over time; it is true while it is for any engine core.

    A row without a value changes nothing, nor does one that may still change. Rows are looked at once.
    """

    def __init__(self, condition: Condition) -> None:
        self.condition = condition
        self._holds: dict[int, bool] = {}
        """By rank, the truth for the newest row that has a value."""
        self._seen: dict[int, float] = {}
        """By rank, the end of the newest row that was looked at."""

    @property
    def is_true(self) -> bool:
        """Tell whether the condition is true."""
        return any(self._holds.values())

    def begin(self, history: MetricsHistory) -> None:
        """Look at the newest row of each engine core alone: what was before the watch is of no interest."""
        for rank in history.ranks:
            *earlier, _ = [span.end for span in self._whole(history) if span.rank == rank] or [0.0]
            self._seen[rank] = max(earlier, default=self._seen.get(rank, 0.0))

    def take(self, history: MetricsHistory) -> list[Change]:
        """Take in the newest history, and return what has changed, in order."""
        changes = []
        was_true = self.is_true
        for rank in self._holds.keys() - set(history.ranks):
            del self._holds[rank]
        if was_true and not self.is_true:
            changes.append(Change(False, None))
        for row in self._whole(history):
            if row.end <= self._seen.get(row.rank, 0.0):
                continue
            self._seen[row.rank] = row.end
            holds = self.condition.holds(row)
            if holds is None:
                continue
            before = self.is_true
            self._holds[row.rank] = holds
            if self.is_true is not before:
                changes.append(Change(self.is_true, row))
        return changes

    @staticmethod
    def _whole(history: MetricsHistory) -> Sequence[HistoryRow]:
        return [span for span in history.spans if span.end <= history.now]
