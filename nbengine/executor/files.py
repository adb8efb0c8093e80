"""Where an executor may leave files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorFiles:
    """Directories of one engine (0700), which its host removes with all that is in them, and its log.

    `sockets` has a path short enough for Unix sockets; `shared_memory` lies in memory where there is such a place.
    `log` is None where nobody keeps one. `board` is the path of the workers' `WorkerBoard`, once an executor has made
    one for them.
    """

    sockets: str
    shared_memory: str
    log: str | None = None
    board: str | None = None
