"""The scores of a comparison: values and errors by name and place, as data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from nbengine.errors import InvalidTypeError
from nbengine.frontend.runs.run import FoundScores
from nbengine.plain import plain

Score = bool | int | float
Place = tuple[int, int]
"""The position of a result, and the number of its answer, which is 0 without `-n`."""


class Scores:
    """The scores of a comparison's answers.

    `values[name]` has the truth values or numbers by (position of the result, number of the answer);
    `errors[name]` says by the same places why there is none. An answer that has not ended, or that failed,
    has neither.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = list(names)
        self.values: dict[str, dict[Place, Score]] = {name: {} for name in names}
        self.errors: dict[str, dict[Place, str]] = {name: {} for name in names}
        self.judged: dict[int, dict[str, str]] = {}
        """The choices of the judge, by the position of the result and a digest of the question."""
        self._earlier: dict[int, Mapping[str, Any]] = {}
        """The scores that the kept runs of results had, by position."""
        self._changed: set[int] = set()
        self._open: Counter[int] = Counter()
        self._found: Counter[int] = Counter()

    def begin(self, place: Place, names: Sequence[str]) -> None:
        """Note that these scores of an answer are being found."""
        self._open[place[0]] += len(names)

    def note(self, name: str, place: Place, outcome: Score | BaseException) -> None:
        """Note the score of an answer, or the error in its place."""
        self._open[place[0]] -= 1
        self._found[place[0]] += 1
        self._changed.add(place[0])
        if isinstance(outcome, BaseException):
            self.errors[name][place] = f"{type(outcome).__name__}: {outcome}"
        else:
            self.values[name][place] = outcome

    def note_choice(self, position: int, question: str, choice: str) -> None:
        """Note what the judge has chosen; it is not asked this again."""
        self.judged.setdefault(position, {})[question] = choice
        self._changed.add(position)

    def restore(self, position: int, run: Mapping[str, Any]) -> None:
        """Take what a kept run has of the scores of its answer: the judge's choices hold, other scores are found again."""
        self.judged[position], self._earlier[position] = dict(run["judged"]), run["scores"]

    def found_of(self, position: int, num_answers: int) -> FoundScores:
        """Return all that has been found of a result, as its run keeps it."""
        scores = dict(self._earlier.get(position, {}))
        for name in self.names:
            values = [self.values[name].get((position, number)) for number in range(num_answers)]
            if any(value is not None for value in values):
                scores[name] = values if num_answers > 1 else values[0]
            else:
                scores.pop(name, None)
        return FoundScores(scores, dict(self.judged.get(position, {})))

    def take_changed(self) -> set[int]:
        """Return the positions of which something has been found since the last time."""
        changed, self._changed = self._changed, set()
        return changed

    def renew(self, position: int) -> None:
        """Forget all about one result, whose answers are others now."""
        self.forget(position, self.names)
        self.judged.pop(position, None)
        self._earlier.pop(position, None)

    def forget(self, position: int, names: Sequence[str]) -> None:
        """Remove these scores of one result."""
        for name in names:
            columns: list[dict[Place, Any]] = [self.values[name], self.errors[name]]
            for known in columns:
                for place in [place for place in known if place[0] == position]:
                    del known[place]
                    self._found[position] -= 1

    def give_up(self) -> None:
        """Expect no further score."""
        self._open.clear()

    @property
    def num_open(self) -> int:
        """Count the scores that are being found."""
        return self._open.total()

    @property
    def num_found(self) -> int:
        """Count the scores and errors that have been found."""
        return self._found.total()

    def num_found_of(self, position: int) -> int:
        """Count those of one result."""
        return self._found[position]

    def is_open(self, position: int) -> bool:
        """Return whether scores of a result are still being found."""
        return self._open[position] > 0

    def is_truth(self, name: str) -> bool:
        """Return whether a score consists of truth values."""
        return all(isinstance(value, bool) for value in self.values[name].values())

    def columns(self, place: Place) -> dict[str, Any]:
        """Make the columns of an answer's row; a score with errors anywhere has a column NAME_error, too."""
        row: dict[str, Any] = {}
        for name in self.names:
            row[name] = self.values[name].get(place)
            if self.errors[name]:
                row[error_column(name)] = self.errors[name].get(place)
        return row


def error_column(name: str) -> str:
    """Return the name of the column with the errors of a score."""
    return f"{name}_error"


def score_of(value: object, name: str) -> Score:
    """Return the number or truth value that a function has given.

    Raises:
        InvalidTypeError: it is neither, or no finite number.
    """
    found = plain(value)
    if isinstance(found, bool):
        return found
    if isinstance(found, int | float):
        try:
            if math.isfinite(found):
                return found
        except OverflowError:
            pass  # An integer beyond all floats has no mean.
    raise InvalidTypeError(f"the value of {name}(result, row)", value, "a truth value or a finite number")
