"""The progress of the start of engine cores: its stages, and the part of each core and worker in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbengine.config import ParallelConfig
from nbengine.distributed.layout import RankLayout
from nbengine.ipc.control_messages import Progress

_MARKS = {"done": "✓", "running": "▸", "failed": "✗"}
PartKey = tuple[int, int | None]
"""An engine core and its worker; the worker is None for the core itself."""


@dataclass
class Part:
    """A stage, or the part of one core or worker in it; `state` is "running", "done" or "failed"."""

    name: str
    started: float
    """The time of the start, on `time.monotonic()`."""
    detail: str = ""
    fraction: float | None = None
    seconds: float = 0.0
    state: str = "running"

    def take(self, progress: Progress) -> None:
        """Take in a report."""
        self.fraction = progress.fraction
        self.detail = progress.detail or self.detail
        self.seconds = max(self.seconds, progress.seconds)

    def end(self, state: str = "done") -> None:
        """Stop the clock."""
        self.seconds = max(self.seconds, time.monotonic() - self.started)
        self.state = state

    @property
    def is_running(self) -> bool:
        """Return whether the part still runs."""
        return self.state == "running"

    def line_below(self, width: int) -> str:
        """Render one line of text, to stand under that of the stage; names take `width` places."""
        detail = "" if self.state == "done" else self.detail
        return f"    {_MARKS[self.state]} {self.name:<{width}} {self.seconds:5.1f} s  {self.share}{detail}".rstrip()

    @property
    def share(self) -> str:
        """Format the share that is done, while the part runs and if the share is known."""
        return f"{self.fraction:4.0%}  " if self.fraction is not None and self.is_running else ""


@dataclass
class Stage(Part):
    """A stage with the parts of those cores and workers that have reported on it."""

    num_cores: int = 1
    world_size: int = 1
    """The workers of a core."""
    parts: dict[PartKey, Part] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Render the stage and its parts, a line each."""
        width = max((len(part.name) for part in self.parts.values()), default=0)
        parts = [part.line_below(max(width, 7)) for _, part in sorted(self.parts.items(), key=_order)]
        return [self.line_of(self, self.detail), *parts]

    def line_of(self, part: Part, detail: str) -> str:
        """Render one line of text about the stage or a part of it, to stand alone."""
        return f"  {_MARKS[part.state]} {self.name:<8} {part.seconds:6.1f} s  {part.share}{detail}".rstrip()

    @property
    def is_of_workers(self) -> bool:
        """Return whether workers report the stage, rather than engine cores."""
        return any(worker is not None for _, worker in self.parts)

    @property
    def num_parts(self) -> int:
        """Count the cores or workers that have a part in the stage."""
        return self.num_cores * (self.world_size if self.is_of_workers else 1)

    @property
    def num_done(self) -> int:
        """Count the cores or workers that have done their part."""
        return sum(part.state == "done" for part in self.parts.values())

    @property
    def is_complete(self) -> bool:
        """Return whether all have done their part."""
        return self.num_done >= self.num_parts

    def sum_up(self) -> None:
        """Set the stage's detail and share from its parts.

        The share counts all parts, also those that have not reported yet, so that it never goes down when one
        of them begins.
        """
        noun = "worker" if self.is_of_workers else "engine core"
        self.detail = f"{self.num_done} of {self.num_parts} {noun}{'' if self.num_parts == 1 else 's'}"
        done = sum(1.0 if part.state == "done" else part.fraction or 0.0 for part in self.parts.values())
        self.fraction = min(1.0, done / self.num_parts)


class StartStages:
    """The stages so far. Those that report need not be at the same stage.

    A stage is over when all who have a part in it have left it, or when the process that starts them is at a
    later one. Where one engine core starts, as rank 0, its reports are the stage; each of several has a part
    in it.
    """

    def __init__(self, parallel: ParallelConfig, ranks: Sequence[int] | None = None) -> None:
        """Prepare the stages; `ranks` are the engine cores that start, all that are configured by default."""
        self._parallel = parallel
        self._ranks = range(parallel.data_parallel_size) if ranks is None else ranks
        self._names_cores = list(self._ranks) != [0]
        self._stages: list[Stage] = []

    def take(self, progress: Progress) -> list[str]:
        """Take in a report, and return a line for each stage and each part of one that is over with it."""
        key = self._key(progress)
        stage = self._find(progress.stage, key)
        if stage is not None and not stage.is_running:
            return []
        over = []
        for other in self._running():
            if other is not stage and (key is None or not other.parts):
                over += _end_stage(other)
        if stage is None:
            started = time.monotonic() - progress.seconds
            stage = Stage(
                progress.stage,
                started,
                num_cores=len(self._ranks),
                world_size=self._parallel.world_size,
            )
            self._stages.append(stage)
        if key is None:
            stage.take(progress)
        else:
            over += self._take_part(stage, key, progress)
        return over

    def end(self, state: str) -> list[str]:
        """End the stages that still run, and return a line for each."""
        return [line for stage in self._running() for line in _end_stage(stage, state)]

    def tick(self) -> None:
        """Let the seconds of the running stages go on."""
        now = time.monotonic()
        for stage in self._running():
            for part in (stage, *stage.parts.values()):
                if part.is_running:
                    part.seconds = now - part.started

    def lines(self) -> list[str]:
        """Render all stages, a line each."""
        return [line for stage in self._stages for line in stage.lines()]

    def _key(self, progress: Progress) -> PartKey | None:
        """Find the part that a report is about; None: the report is about the stage itself."""
        if progress.rank is None or (progress.worker is None and not self._names_cores):
            return None
        return progress.rank, progress.worker

    def _name(self, key: PartKey) -> str:
        core, worker = key
        names = [f"DP{core}"] if self._names_cores else []
        if worker is not None and not (self._names_cores and self._parallel.world_size == 1):
            names.append(str(RankLayout.of(worker, self._parallel)))
        return " ".join(names)

    def _take_part(self, stage: Stage, key: PartKey, progress: Progress) -> list[str]:
        over = []
        for other in self._running():
            left = (
                [] if other is stage else [part for owner, part in other.parts.items() if _covers(key, owner)]
            )
            for part in left:
                over += _end_part(other, part)
            over += _end_stage(other) if left and other.is_complete else []
        if key not in stage.parts:
            stage.parts[key] = Part(self._name(key), time.monotonic() - progress.seconds)
        stage.parts[key].take(progress)
        if progress.fraction == 1.0:
            over += _end_part(stage, stage.parts[key])
        stage.sum_up()
        return over

    def _find(self, name: str, key: PartKey | None) -> Stage | None:
        """Find the stage that a report is about; None if there is none.

        It runs, or it is over and the report comes late.
        """
        for stage in self._stages:
            is_late = key is not None and key in stage.parts
            if stage.name == name and (stage.is_running or is_late):
                return stage
        return None

    def _running(self) -> list[Stage]:
        return [stage for stage in self._stages if stage.is_running]


def _covers(key: PartKey, owner: PartKey) -> bool:
    """Return whether a later stage's report from `key` ends `owner`'s part: a core speaks for its workers."""
    return key == owner or key == (owner[0], None)


def _order(item: tuple[PartKey, Part]) -> tuple[int, int]:
    (core, worker), _ = item
    return core, -1 if worker is None else worker


def _end_part(stage: Stage, part: Part, state: str = "done") -> list[str]:
    if not part.is_running:
        return []
    part.end(state)
    stage.sum_up()
    return [stage.line_of(part, part.name)]


def _end_stage(stage: Stage, state: str = "done") -> list[str]:
    lines = [line for part in stage.parts.values() for line in _end_part(stage, part, state)]
    stage.end(state)
    return [*lines, stage.line_of(stage, stage.detail)]
