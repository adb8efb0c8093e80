"""The processes of an engine, seen from outside: which there are, and that none are left."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable

import psutil

from nbengine.client.connection import ConnectionInfo

POLL_INTERVAL = 0.01
_KILL_TIMEOUT = 5.0


def create_time_of(pid: int) -> float | None:
    """Start time of a process, which tells it from a later one with the same pid; None if it is gone."""
    try:
        created: float = psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None
    return created


def session_processes(info: ConnectionInfo) -> list[psutil.Process]:
    """The engine's running processes, host first: those of its session that go by this project's name.

    The session's number is the host's pid. It is taken again at the earliest when the whole session has ended; a
    host of another start time tells that this has happened.
    """
    if not (info.host_pid and info.is_here):
        return []
    leader_created = create_time_of(info.host_pid)
    if leader_created is not None and abs(leader_created - info.host_create_time) >= 1.0:
        return []
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(
            psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError
        ):
            if os.getsid(pid) == info.host_pid:
                process = psutil.Process(pid)
                if _is_ours(process):
                    found.append(process)
    return sorted(found, key=lambda process: (process.pid != info.host_pid, process.pid))


def _is_ours(process: psutil.Process) -> bool:
    # A process that has just exec'ed or exited has no command line.
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    return any("nbengine" in argument for argument in process.cmdline())


def kill_session(info: ConnectionInfo, grace: float = 0.0) -> list[int]:
    """Wait `grace` seconds for the engine's processes to end, then kill what is left; returns the pids killed."""
    wait_until(lambda: not session_processes(info), grace)
    return kill_processes(session_processes(info))


def kill_processes(processes: Iterable[psutil.Process]) -> list[int]:
    """SIGKILL processes, wait until they are gone, and return the pids of those that there were."""
    killed = []
    for process in processes:
        # `Process.kill` checks that the pid still belongs to the process that was looked at.
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            killed.append(process)
    wait_until(lambda: not any(map(is_running, killed)), _KILL_TIMEOUT)
    return [process.pid for process in killed]


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; neither a zombie does nor a later one with its pid."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def wait_for_host(info: ConnectionInfo, timeout: float) -> bool:
    """Wait until the host's process has ended; False if it still runs, or is on another machine, after `timeout` seconds."""
    return wait_until(lambda: not info.host_alive, timeout)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll `condition` until it holds; False if it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True
