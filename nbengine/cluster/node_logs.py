"""Log files that processes of engines leave on the nodes they run on."""

from __future__ import annotations

import os
from pathlib import Path

from nbengine.client.connection import runtime_dir

KEPT_FILES = 40


def new_node_log(label: str) -> Path:
    """Create an empty log file (0600) for the process that `label` names, and drop the oldest of those there are."""
    directory = runtime_dir() / "nbengine-node-logs"
    directory.mkdir(mode=0o700, exist_ok=True)
    files = sorted(directory.glob("*.log"), key=_modified, reverse=True)
    for path in files[KEPT_FILES - 1 :]:
        path.unlink(missing_ok=True)
    path = directory / f"{label}.{os.getpid()}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    return path


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
