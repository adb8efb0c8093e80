"""How many requests an engine core has had over the last seconds, and what the token budget of its steps went to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nbengine.client.trace_mirror import StepView, TraceMirror
from nbengine.widgets.pictures.figures import duration

SECONDS = 60.0
"""How far back it goes."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Requests in columns of equal time; None where no step ran. Without steps there are no columns."""

    seconds: float
    running: tuple[int | None, ...] = ()
    waiting: tuple[int | None, ...] = ()
    preempted: tuple[int, ...] = ()
    """How often a request was preempted."""

    @property
    def title(self) -> str:
        """What it is."""
        return f"requests, last {duration(self.seconds)}" if self.running else "requests: no steps yet"


def loads_of(mirror: TraceMirror, num_columns: int) -> Loads:
    """The most that ran and waited in each of so many columns, and how often a request was preempted in it."""
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
    """What a chart of the tokens of these steps is called."""
    if not steps:
        return "tokens a step: no steps yet"
    return f"tokens a step, last {len(steps):,} step{'' if len(steps) == 1 else 's'}"


def _end(step: StepView) -> float:
    return step.time + (step.seconds or 0.0)
