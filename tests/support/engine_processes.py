"""The processes of an engine, to be measured and killed by tests."""

from __future__ import annotations

import contextlib

import psutil

from nbengine.client.engines.processes import session_processes
from nbengine.runtime.connection import ConnectionInfo


def processes_of(info: ConnectionInfo) -> list[psutil.Process]:
    """The engine's running processes, host first."""
    return [psutil.Process(process.pid) for process in session_processes(info)]


def is_running(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
