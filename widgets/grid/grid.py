"""The contents of a grid of answers, and the choice of the settings that become its rows and its columns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_DRAWN = 400
"""The most cells that an output of a notebook holds: more of them make a page slow."""
MOST_COLUMNS = 4
"""The most columns: more of them are too narrow to read in a notebook."""


@dataclass(frozen=True)
class ScoreMark:
    """A score as a cell shows it; `state` is "yes" or "no" of a truth value, "failed", or empty for a number."""

    name: str
    text: str
    state: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


@dataclass(frozen=True)
class GridCell:
    """The present answers of one request; `state` is "waiting", "running", "done" or "failed"."""

    answers: tuple[str, ...] = ()
    state: str = "waiting"
    foot: str = ""
    error: str = ""
    rich: tuple[str, ...] = ()
    """HTML that is shown in the place of each answer."""
    scores: tuple[ScoreMark, ...] = ()


@dataclass(frozen=True)
class GridLayout:
    """Labels of rows and columns; cells come row by row, and a side without labels has one row or column."""

    row_names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    column_names: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]

    def label(self, index: int) -> str:
        """Return a cell's settings in one line."""
        row, column = divmod(index, len(self.columns))
        names = (*self.row_names, *self.column_names)
        values = (*self.rows[row], *self.columns[column])
        return " · ".join(
            f"{name} {' '.join(value.split())}" for name, value in zip(names, values, strict=True)
        )


def layout_of(axes: Sequence[tuple[str, Sequence[Any]]], num_rows_first: int) -> GridLayout:
    """Lay axes out, given by name and values, the first `num_rows_first` as rows.

    Of the others the last ones become columns, while there are not more than `MOST_COLUMNS`. The cells, row
    by row, keep the axes' order: the last one's values change fastest.
    """
    split, width = len(axes), 1
    while split > num_rows_first and width * len(axes[split - 1][1]) <= MOST_COLUMNS:
        split -= 1
        width *= len(axes[split][1])
    return GridLayout(
        tuple(name for name, _ in axes[:split]),
        _labels(axes[:split]),
        tuple(name for name, _ in axes[split:]),
        _labels(axes[split:]),
    )


def _labels(axes: Sequence[tuple[str, Sequence[Any]]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(str, values)) for values in itertools.product(*(values for _, values in axes)))


def left_out(layout: GridLayout, num_drawn: int) -> str:
    """Say how many answers are not drawn; empty if all are."""
    rest = len(layout.rows) * len(layout.columns) - num_drawn
    return f"{rest:,} more answers are not drawn; .rows() of the result has all" if rest > 0 else ""
