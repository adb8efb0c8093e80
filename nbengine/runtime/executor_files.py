"""The directories in which an executor may leave files."""

from __future__ import annotations

import os
from dataclasses import dataclass

from nbengine.runtime.directories import EngineDirectories


@dataclass(frozen=True, slots=True)
class ExecutorFiles:
    """Directories of one engine (0700), which its host removes with their content, its log and its name.

    `sockets` has a path short enough for Unix sockets; `shared_memory` lies in memory where the system has
    such a place. `log` is None where nobody keeps one. `board` is the path of the workers' `WorkerBoard`,
    once an executor has made one for them.
    """

    sockets: str
    shared_memory: str
    log: str | None = None
    board: str | None = None
    engine: str = ""


def make_own_files() -> tuple[ExecutorFiles, EngineDirectories]:
    """Make directories for an executor that was given none.

    Raises:
        EngineStartError: no place takes them.
    """
    own = EngineDirectories.make()
    log = os.path.join(own.run_dir, "engine.log")
    return ExecutorFiles(own.run_dir, own.tensor_dir, log, engine="in this process"), own
