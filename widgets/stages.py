"""How far the start of an engine has come: its stages, and each worker's part of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nbengine.config import ParallelConfig
from nbengine.distributed.layout import RankLayout
from nbengine.ipc.messages import Progress

_MARKS = {"done": "✓", "running": "▸", "failed": "✗"}


@dataclass
class Part:
    """A stage, or what one worker does of it. `state` is "running", "done" or "failed"."""

    name: str
    started: float
    """`time.monotonic()`."""
    detail: str = ""
    fraction: float | None = None
    seconds: float = 0.0
    state: str = "running"

    def take(self, progress: Progress) -> None:
        """Take in what has been reported."""
        self.fraction = progress.fraction
        self.detail = progress.detail or self.detail
        self.seconds = max(self.seconds, progress.seconds)

    def end(self, state: str = "done") -> None:
        """Stop the clock."""
        self.seconds = max(self.seconds, time.monotonic() - self.started)
        self.state = state

    @property
    def is_running(self) -> bool:
        """Whether it goes on."""
        return self.state == "running"

    def line(self) -> str:
        """One line of text, under that of the stage."""
        detail = "" if self.state == "done" else self.detail
        return f"    {_MARKS[self.state]} {self.name:<7} {self.seconds:5.1f} s  {self.share}{detail}".rstrip()

    @property
    def share(self) -> str:
        """How much is done, while it runs and if that is known."""
        return f"{self.fraction:4.0%}  " if self.fraction is not None and self.is_running else ""


@dataclass
class Stage(Part):
    """A stage with the parts of those workers, by rank, that have reported something of it."""

    num_workers: int = 1
    workers: dict[int, Part] = field(default_factory=dict)

    def line(self) -> str:
        """One line of text."""
        return self.line_of(self, self.detail)

    def line_of(self, part: Part, detail: str) -> str:
        """One line of text about the stage or a part of it, to stand alone."""
        return f"  {_MARKS[part.state]} {self.name:<8} {part.seconds:6.1f} s  {part.share}{detail}".rstrip()

    @property
    def num_done(self) -> int:
        """Workers that have done their part."""
        return sum(part.state == "done" for part in self.workers.values())

    @property
    def is_complete(self) -> bool:
        """Whether all workers have done their part."""
        return self.num_done >= self.num_workers

    def sum_up(self) -> None:
        """Say of the stage what its parts come to.

        The share is that of all workers, those not heard of yet included, so that it never goes down when one of
        them begins.
        """
        self.detail = f"{self.num_done} of {self.num_workers} workers"
        done = sum(1.0 if part.state == "done" else part.fraction or 0.0 for part in self.workers.values())
        self.fraction = min(1.0, done / self.num_workers)


class StartStages:
    """The stages so far. Those that report need not be at the same stage; a stage is over when all workers have
    left it, or when the engine core is at a later one."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._stages: list[Stage] = []

    def take(self, progress: Progress) -> list[str]:
        """Take in a report, and return a line for each stage and each worker's part that is over with it."""
        over = []
        stage = self._find(progress)
        if stage is not None and not stage.is_running:
            return []
        for other in self._running():
            if other is not stage and (progress.worker is None or not other.workers):
                over += _end_stage(other)
        if stage is None:
            started = time.monotonic() - progress.seconds
            stage = Stage(progress.stage, started, num_workers=self._parallel.world_size)
            self._stages.append(stage)
        if progress.worker is None:
            stage.take(progress)
        else:
            over += self._take_part(stage, progress.worker, progress)
        return over

    def end(self, state: str) -> list[str]:
        """End what still runs, and return a line for each."""
        return [line for stage in self._running() for line in _end_stage(stage, state)]

    def tick(self) -> None:
        """Let the seconds of what runs go on."""
        now = time.monotonic()
        for stage in self._running():
            for part in (stage, *stage.workers.values()):
                if part.is_running:
                    part.seconds = now - part.started

    def lines(self) -> list[str]:
        """All of it, a line each."""
        return [
            line
            for stage in self._stages
            for line in (stage.line(), *(part.line() for _, part in sorted(stage.workers.items())))
        ]

    def _take_part(self, stage: Stage, worker: int, progress: Progress) -> list[str]:
        over = []
        for other in self._running():
            if other is not stage and worker in other.workers:
                over += _end_part(other, other.workers[worker])
                over += _end_stage(other) if other.is_complete else []
        if worker not in stage.workers:
            label = str(RankLayout.of(worker, self._parallel))
            stage.workers[worker] = Part(label, time.monotonic() - progress.seconds)
        stage.workers[worker].take(progress)
        if progress.fraction == 1.0:
            over += _end_part(stage, stage.workers[worker])
        stage.sum_up()
        return over

    def _find(self, progress: Progress) -> Stage | None:
        """The stage that a report is about, if there is one: one that is over where a worker's word on it comes late."""
        for stage in self._stages:
            is_late = progress.worker is not None and progress.worker in stage.workers
            if stage.name == progress.stage and (stage.is_running or is_late):
                return stage
        return None

    def _running(self) -> list[Stage]:
        return [stage for stage in self._stages if stage.is_running]


def _end_part(stage: Stage, part: Part, state: str = "done") -> list[str]:
    if not part.is_running:
        return []
    part.end(state)
    stage.sum_up()
    return [stage.line_of(part, part.name)]


def _end_stage(stage: Stage, state: str = "done") -> list[str]:
    lines = [line for part in stage.workers.values() for line in _end_part(stage, part, state)]
    stage.end(state)
    return [*lines, stage.line()]
