"""The resources that single processes use, seen from outside;
a process may vanish meanwhile, or be another user's."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbengine.ipc.transport import host_of, port_of
from nbengine.runtime.connection import ConnectionInfo

_CONNECT_TIMEOUT = 0.2
_CREDENTIALS = struct.Struct("3i")
"""The layout of `struct ucred` of Linux: pid, uid, gid."""


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The usage of a process at one moment. A number is None where the system does not tell it, as of a
    process that is gone."""

    pid: int
    title: str = ""
    """The title that `ps` shows of a process of an engine; for another process the program and the script or
    module that it runs, without arguments, which may be secret. All characters are printable."""
    is_running: bool = False
    memory_bytes: int | None = None
    """Resident memory, pages shared with other processes included."""
    cpu_seconds: float | None = None
    """CPU time on all cores since its start."""
    num_threads: int | None = None
    is_stopped: bool = False
    """SIGSTOP or its like has stopped the process, which has not ended."""


def usage_of(pid: int, *, session: int | None = None, parent: int | None = None) -> ProcessUsage:
    """Look at a process; if its session or parent is not the given one,
    it is a later process with the same pid."""
    try:
        if session is not None and os.getsid(pid) != session:
            return ProcessUsage(pid)
        process = psutil.Process(pid)
        with process.oneshot():
            is_stranger = parent is not None and process.ppid() != parent
            if is_stranger or process.status() == psutil.STATUS_ZOMBIE:
                return ProcessUsage(pid)
            return _usage(process)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return ProcessUsage(pid)
    except (psutil.AccessDenied, PermissionError):
        return ProcessUsage(pid, is_running=True)


def client_pids(info: ConnectionInfo) -> list[int]:
    """List the processes of this machine that are clients of the engine;
    empty where the system does not tell."""
    if info.keys is not None:
        return _connected_pids(info.address("host.sock"))
    pids = {_listener(path) for path in Path(info.run_dir).glob("c-*.in")}
    return sorted(pid for pid in pids if pid)


def _connected_pids(address: str) -> list[int]:
    place = host_of(address), port_of(address)
    with contextlib.suppress(psutil.AccessDenied):
        connections = psutil.net_connections("tcp")
        return sorted({c.pid for c in connections if c.pid and c.raddr and tuple(c.raddr) == place})
    return []


def _usage(process: psutil.Process) -> ProcessUsage:
    title = _title(process.cmdline()) or process.name()
    memory = cpu = threads = None
    with contextlib.suppress(psutil.AccessDenied):
        memory = int(process.memory_info().rss)
    with contextlib.suppress(psutil.AccessDenied):
        times = process.cpu_times()
        cpu = float(times.user + times.system)
    with contextlib.suppress(psutil.AccessDenied):
        threads = int(process.num_threads())
    is_stopped = process.status() == psutil.STATUS_STOPPED
    return ProcessUsage(process.pid, printable(title), True, memory, cpu, threads, is_stopped)


def _title(command: Sequence[str]) -> str:
    if command[:1] == ["nbengine:"]:
        return " ".join(command)
    shown = []
    for argument in itertools.takewhile(lambda argument: argument != "-c", command):
        if not argument.startswith("--"):
            shown.append(os.path.basename(argument))
        if len(shown) > 1 and not argument.startswith("-"):
            break
    return " ".join(shown)


def _listener(path: Path) -> int:
    """Return the pid that listens on a Unix socket, 0 if no process does or the system does not tell."""
    if sys.platform != "linux":
        return 0
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT)
        try:
            probe.connect(str(path))
            credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        except OSError:
            return 0
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def printable(text: str) -> str:
    """Put a text on one line, without characters that could control a terminal or are not allowed in XML."""
    if not text.isprintable():
        text = "".join(
            character
            if character.isprintable()
            else " "
            if character.isspace()
            else "\N{REPLACEMENT CHARACTER}"
            for character in text
        )
    return text.strip()
