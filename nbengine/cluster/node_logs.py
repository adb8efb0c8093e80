"""The log files that processes of engines leave on the nodes on which they run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nbengine.ipc.private import make_own_directory, opened
from nbengine.runtime.connection import runtime_dir

KEPT_FILES = 40


def new_node_log(label: str) -> Path:
    """Create an empty log file (0600) for the process that `label` names,
    and remove the oldest if there are too many."""
    directory = make_own_directory(
        runtime_dir() / "nbengine-node-logs", "the directory of logs", "NBENGINE_RUNTIME_DIR chooses another"
    )
    files = sorted(directory.glob("*.log"), key=_modified, reverse=True)
    for path in files[KEPT_FILES - 1 :]:
        with contextlib.suppress(OSError):
            path.unlink()
    path = directory / f"{label}.{os.getpid()}.log"
    with opened(path, os.O_CREAT | os.O_TRUNC):
        return path


def _modified(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0
