"""Where an executor may leave files."""

from __future__ import annotations

import shutil
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorFiles:
    """Directories of one engine (0700), which its host removes with all that is in them, its log and its name.

    `sockets` has a path short enough for Unix sockets; `shared_memory` lies in memory where there is such a place.
    `log` is None where nobody keeps one. `board` is the path of the workers' `WorkerBoard`, once an executor has made
    one for them.
    """

    sockets: str
    shared_memory: str
    log: str | None = None
    board: str | None = None
    engine: str = ""


@dataclass(frozen=True, slots=True)
class OwnDirectories:
    """Directories that an executor without a host has made for itself."""

    paths: tuple[str, ...] = ()

    def remove(self) -> None:
        """Remove them with all that is in them; not an error where they are gone already."""
        for path in self.paths:
            shutil.rmtree(path, ignore_errors=True)


def make_own_files() -> tuple[ExecutorFiles, OwnDirectories]:
    """Make directories for an executor that nobody has given any.

    Raises:
        NBEngineError: there is no place for them.
    """
    from nbengine.client.connection import new_run_dir
    from nbengine.ipc.shm_tensors import new_tensor_dir

    sockets = new_run_dir()
    shared_memory = new_tensor_dir(sockets)
    files = ExecutorFiles(
        str(sockets), str(shared_memory), str(sockets / "engine.log"), engine="in this process"
    )
    return files, OwnDirectories((str(shared_memory), str(sockets)))
