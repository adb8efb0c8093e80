"""The last steps as a grid: each step is a column, each request a row."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice

from nbengine.client.observe.trace_mirror import StepView, TraceMirror
from nbengine.widgets.dashboard.step_frames import DECODE, PROMPT, RECOMPUTED

_LOOK_BACK = 2
"""Multiples of the grid's length that are read, to know which requests were preempted before the grid."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """A request's part in the steps; positions are columns of the grid."""

    number: int
    kinds: tuple[int | None, ...]
    """`DECODE`, `PROMPT` or `RECOMPUTED` by column; None: the request had no part in the step."""
    hits: tuple[int, ...]
    """Columns of the admissions that found a part of the prompt in the prefix cache."""
    preempted: tuple[int, ...]
    """Columns of the steps before which the request was preempted."""
    finished: int | None
    """Column of the step after which the request ended."""


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The last steps of an engine core."""

    steps: tuple[StepView, ...]
    rows: tuple[StepRow, ...]
    """The rows of the requests with a part in the latest steps, by number."""
    num_more: int
    """The number of further requests that had a part in these steps."""


def grid_of(mirror: TraceMirror, max_steps: int, max_rows: int) -> StepGrid:
    """Make the grid of the last steps, and of the requests with the latest part in them."""
    known = last_steps(mirror, _LOOK_BACK * max_steps)
    steps = known[-max_steps:]
    latest: dict[int, int] = {}
    for column, step in enumerate(steps):
        if column and step.numbers is steps[column - 1].numbers and not step.preempted:
            continue
        latest.update(dict.fromkeys(step.preempted, column))
        latest.update(dict.fromkeys(step.numbers, column))
    if steps:
        latest.update(dict.fromkeys(steps[-1].numbers, len(steps)))
    chosen = sorted(sorted(latest, key=lambda number: (-latest[number], -number))[:max_rows])
    tracks = {number: _Track() for number in chosen}
    places: dict[int, int] = {}
    for index, step in enumerate(known):
        if not index or step.numbers is not known[index - 1].numbers:
            places = {number: place for place, number in enumerate(step.numbers) if number in tracks}
        _take(tracks, places, step, index + len(steps) - len(known))
    rows = tuple(track.row(number, len(steps)) for number, track in tracks.items())
    return StepGrid(steps, rows, len(latest) - len(rows))


@dataclass(slots=True)
class _Track:
    """The facts about a request while the steps are read; columns before the grid's are negative."""

    kinds: dict[int, int] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    finished: int | None = None
    is_recomputing: bool = False
    """The last admission was after a preemption."""

    def row(self, number: int, num_columns: int) -> StepRow:
        """Make the row of the columns that lie in the grid."""
        return StepRow(
            number,
            tuple(self.kinds.get(column) for column in range(num_columns)),
            tuple(column for column in self.hits if column >= 0),
            tuple(column for column in self.preempted if column >= 0),
            self.finished if self.finished is not None and self.finished >= 0 else None,
        )


def _take(tracks: dict[int, _Track], places: dict[int, int], step: StepView, column: int) -> None:
    """Take a step into the tracks; `places` has the positions of their requests in the step's lists."""
    for number in step.preempted:
        if number in tracks:
            tracks[number].preempted.append(column)
    for number, place in places.items():
        track = tracks[number]
        if number in step.admitted:
            track.is_recomputing = number in step.resumed
            if step.num_computed[place]:
                track.hits.append(column)
        if number not in step.prefills:
            track.kinds[column] = DECODE
        else:
            track.kinds[column] = RECOMPUTED if track.is_recomputing else PROMPT
    for number in step.finished:
        if number in tracks:
            tracks[number].finished = column


def last_steps(mirror: TraceMirror, limit: int) -> tuple[StepView, ...]:
    """Return the last steps, the latest last."""
    return tuple(reversed(tuple(islice(reversed(mirror.steps), limit))))


def summary(grid: StepGrid) -> str:
    """Name the first and the last step, in a line."""
    if not grid.steps:
        return "no steps yet"
    first, last = grid.steps[0], grid.steps[-1]
    if len(grid.steps) == 1:
        return f"step {first.step:,}"
    return f"{len(grid.steps):,} steps, {first.step:,} to {last.step:,}, in {last.time - first.time:.3g} s"
