"""The requests that an engine core has had over the last seconds, and the titles of two charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbengine.client.observe.trace_mirror import StepView, TraceMirror
from nbengine.widgets.pictures.figures import duration

SECONDS = 60.0
"""Seconds that the chart goes back."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Requests in columns of equal time; None where no step ran. Without steps there are no columns."""

    seconds: float
    running: tuple[int | None, ...] = ()
    waiting: tuple[int | None, ...] = ()
    preempted: tuple[int, ...] = ()
    """The number of preemptions in each column."""

    @property
    def title(self) -> str:
        """Return the title of the chart."""
        return f"requests, last {duration(self.seconds)}" if self.running else "requests: no steps yet"


def loads_of(mirror: TraceMirror, num_columns: int) -> Loads:
    """Find the most requests that ran and waited in each of `num_columns` columns, and the preemptions."""
    steps: list[StepView] = []
    for step in reversed(mirror.steps):
        if mirror.steps[-1].time - step.time > SECONDS:
            break
        steps.append(step)
    if not steps:
        return Loads(0.0)
    steps.reverse()
    start = steps[0].time
    seconds = max(_end(step) for step in steps) - start

    def column_at(moment: float) -> int:
        return min(num_columns - 1, int((moment - start) / seconds * num_columns)) if seconds > 0 else 0

    running: list[int | None] = [None] * num_columns
    waiting: list[int | None] = [None] * num_columns
    preempted = [0] * num_columns
    for step in steps:
        first = max(0, column_at(step.time))
        preempted[first] += len(step.preempted)
        for column in range(first, max(first, column_at(_end(step))) + 1):
            running[column] = max(running[column] or 0, step.num_running)
            waiting[column] = max(waiting[column] or 0, step.num_waiting)
    return Loads(seconds, tuple(running), tuple(waiting), tuple(preempted))


def budget_title(steps: Sequence[StepView]) -> str:
    """Return the title of a chart of the tokens of these steps."""
    if not steps:
        return "tokens a step: no steps yet"
    return f"tokens a step, last {len(steps):,} step{'' if len(steps) == 1 else 's'}"


def _end(step: StepView) -> float:
    return step.time + (step.seconds or 0.0)
