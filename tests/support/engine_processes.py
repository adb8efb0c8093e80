"""The processes of an engine, to be measured and killed by tests."""

from __future__ import annotations

import contextlib

import psutil
from stopping import PATIENCE, stop

from nbengine.client.engines.processes import session_processes, wait_until
from nbengine.runtime.connection import ConnectionInfo


def processes_of(info: ConnectionInfo) -> list[psutil.Process]:
    """The engine's running processes, host first."""
    return [psutil.Process(process.pid) for process in session_processes(info)]


def kill_all(info: ConnectionInfo) -> None:
    """SIGKILL every process of an engine at once, so that none can clean up."""
    processes = processes_of(info)
    stop(*(process.pid for process in processes))
    # The host last: the kernel wakes stopped cores whose host has gone.
    for process in reversed(processes):
        process.kill()
    assert wait_until(lambda: not (info.host_alive or session_processes(info)), PATIENCE)


def is_running(process: psutil.Process) -> bool:
    """Return whether a process runs; a zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
