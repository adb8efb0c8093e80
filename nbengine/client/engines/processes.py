"""The processes of an engine, seen from outside: this module lists them, and ends those that are left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

import psutil

from nbengine.ipc.liveness import ProcessIdentity, identity_of, is_alive, send_signal
from nbengine.ipc.shortage import is_shortage
from nbengine.runtime.connection import ConnectionInfo

POLL_INTERVAL = 0.01
_KILL_TIMEOUT = 5.0


def session_processes(info: ConnectionInfo) -> list[ProcessIdentity]:
    """List the engine's running processes, host first: those of its session that have this project's name.

    The session's number is the host's pid. It may be given out again once the whole session has ended; a
    process with that pid and another start tells that this has happened.
    """
    if not (info.host.pid and info.is_here):
        return []
    if not is_alive(info.host) and identity_of(info.host_pid) is not None:
        return []
    found = [process for pid in psutil.pids() if (process := _member(pid, info.host_pid)) is not None]
    return sorted(found, key=lambda process: (process.pid != info.host_pid, process.pid))


def _member(pid: int, session: int) -> ProcessIdentity | None:
    """Return the process with a pid if it is one of this project's in a session."""
    try:
        if os.getsid(pid) != session:
            return None
        process = identity_of(pid)
        # The identity is taken before the checks: if the process ends meanwhile, no later one gets its
        # signals. A process that has just exec'ed or exited has no command line.
        is_ours = any("nbengine" in argument for argument in psutil.Process(pid).cmdline())
        return process if is_ours and os.getsid(pid) == session else None
    except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError):
        return None


def resident_bytes(process: ProcessIdentity) -> int:
    """Return the resident memory of a process, in bytes, shared pages included; 0 if it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if is_alive(process):
            return int(psutil.Process(process.pid).memory_info().rss)
    return 0


def kill_session(info: ConnectionInfo, grace: float = 0.0) -> list[int]:
    """Wait `grace` seconds for the engine's processes to end, then kill the others and return their pids."""
    wait_until(lambda: not session_processes(info), grace)
    return kill_processes(session_processes(info))


def kill_processes(processes: Iterable[ProcessIdentity]) -> list[int]:
    """Kill processes (SIGKILL), wait until they are gone,
    and return the pids of those that had not ended before."""
    killed = [process for process in processes if send_signal(process, signal.SIGKILL)]
    wait_until(lambda: not any(map(is_alive, killed)), _KILL_TIMEOUT)
    return [process.pid for process in killed]


def wait_for_host(info: ConnectionInfo, timeout: float) -> bool:
    """Wait until the host has ended; return False if it runs, or is on another machine,
    after `timeout` seconds."""
    return wait_until(lambda: not info.host_alive, timeout)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Poll `condition` until it holds; return False if it does not within `timeout` seconds.

    A condition that fails with a shortage does not hold yet.
    """
    deadline = time.monotonic() + timeout
    while not _holds(condition):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_INTERVAL)
    return True


def _holds(condition: Callable[[], bool]) -> bool:
    try:
        return condition()
    except OSError as error:
        if not is_shortage(error):
            raise
        return False
