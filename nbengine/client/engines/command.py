"""The command line and the environment of a host process."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from nbengine.runtime.processes import child_environment


def host_command(*arguments: str) -> list[str]:
    """Return the command line of a host process, `("host", run_dir)` for example."""
    # -P: a file beside the notebook must not shadow a module of the engine's.
    return [sys.executable, "-P", "-m", "nbengine.engine", *arguments]


def host_environment() -> dict[str, str]:
    """Return the environment of a host process, in which it finds this package where it is not installed but lies
    on `sys.path`."""
    environment = child_environment()
    try:
        importlib.metadata.distribution("nbengine")
    except importlib.metadata.PackageNotFoundError:
        root = str(Path(__file__).resolve().parents[3])
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not path else os.pathsep.join((root, path))
    return environment
