"""The engines of this user: which there are, finding one, ending one, clearing away what dead ones left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import zmq

from nbengine.client.connection import (
    ConnectionInfo,
    connection_file,
    engine_file,
    list_connections,
    read_connection,
    remove_engine_files,
)
from nbengine.client.launch import bury_child, reap_children
from nbengine.client.processes import (
    is_running,
    kill_processes,
    kill_session,
    session_processes,
    wait_for_host,
    wait_until,
)
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import EngineDead, HostToClient, Shutdown
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import port_of

STOP_TIMEOUT = 10.0
"""Seconds that an engine gets to end when asked, before it is made to."""
TERMINATE_TIMEOUT = 5.0
ORPHAN_GRACE = 2.0
"""Seconds that an engine core gets to end by itself when its host is gone."""
_CONNECT_TIMEOUT = 0.2
_YOUNG = 60.0
"""Seconds for which a run directory without processes may belong to an engine that is being started."""
_INSIDE_ENGINE = re.compile(r"^nbengine: (core|worker) |-m nbengine\.engine (core|worker) ")
"""Command lines of an engine's processes other than its host, before and after they have taken a title. Workers of an
engine in a program's own process lead sessions of their own."""
_RUN_DIR = re.compile(r"nbe-\w{8}")


@dataclass(frozen=True, slots=True)
class EngineListing:
    """An engine as `nbengine ps` shows it. `memory_bytes` is the resident memory of all its processes, workers included."""

    info: ConnectionInfo
    state: str
    num_clients: int
    pids: list[int]
    memory_bytes: int


@dataclass(slots=True)
class ReapReport:
    """What `reap` has removed or ended."""

    dead: list[str] = field(default_factory=list)
    """Names of engines that had died and left files or processes."""
    ended: list[str] = field(default_factory=list)
    """Names of running engines that nobody was attached to."""
    killed_pids: list[int] = field(default_factory=list)
    removed_dirs: list[str] = field(default_factory=list)
    """Run directories that no engine knew of."""


def find_engine(name_or_file: str | Path) -> ConnectionInfo:
    """The running engine of a name or connection file.

    Raises:
        NBEngineError: there is none; the message lists those there are.
    """
    path = Path(name_or_file)
    if not (path.suffix == ".json" and path.is_file()):
        path = connection_file(str(name_or_file))
    if not path.is_file():
        names = ", ".join(info.name for info in list_connections() if info.host_alive) or "none"
        raise NBEngineError(f"no engine is called {str(name_or_file)!r}; running: {names}")
    info = read_connection(path)
    if not info.host_alive:
        raise NBEngineError(
            f"engine {info.name} is dead (its host, pid {info.host_pid}, is gone); see {info.log_path}"
        )
    return info


def list_engines() -> list[EngineListing]:
    """All engines that have a connection file, oldest first, dead ones included."""
    reap_children()
    return [_listing(info) for info in list_connections()]


def stop_engine(info: ConnectionInfo, *, drain: bool = False, timeout: float = STOP_TIMEOUT) -> None:
    """End an engine that this process need not be a client of, and wait until nothing is left of it.

    It is asked first (with `drain` it may finish what runs, within `timeout` seconds), then terminated, then killed.

    Raises:
        NBEngineError: it is on another machine, where it can only be asked, and has not ended in time.
    """
    context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
    control = make_socket(context, info.address("host.sock"), zmq.DEALER, bind=False)
    try:
        control.send(encode_control(Shutdown(drain)))
        gone = wait_for_host(info, timeout) if info.is_here else _says_that_it_ends(control, timeout)
    finally:
        control.close()
        context.term()
    if not (gone or info.is_here):
        raise NBEngineError(f"engine {info.name} on another machine has not ended within {timeout:g} s")
    if not gone:
        for process in session_processes(info)[:1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        wait_for_host(info, TERMINATE_TIMEOUT)
    kill_session(info)
    remove_engine_files(info)
    bury_child(info.run_dir)


def _says_that_it_ends(control: zmq.Socket[bytes], timeout: float) -> bool:
    """Wait for the last message of a host that was asked to end: it comes when nothing is left of the engine."""
    decoder = ControlDecoder[HostToClient](HostToClient)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if control.poll(int(left * 1000) + 1) and isinstance(decoder.decode(control.recv()), EngineDead):
            return True
    return False


def reap(*, end_unattached: bool = False) -> ReapReport:
    """Remove files and processes that dead engines have left; running engines are left alone.

    With `end_unattached`, unbound engines that nobody is attached to are ended, too, however long they would still
    have waited for someone.
    """
    report = ReapReport()
    reap_children()
    for info in list_connections():
        if not info.host_alive:
            report.killed_pids += kill_session(info, ORPHAN_GRACE)
            remove_engine_files(info)
            bury_child(info.run_dir)
            report.dead.append(info.name)
        elif (
            end_unattached
            and info.is_here
            and not info.config.bound
            and info.ready
            and not count_clients(info)
        ):
            stop_engine(info)
            report.ended.append(info.name)
    report.killed_pids += _kill_orphans()
    report.removed_dirs += _remove_stray_dirs()
    return report


def count_clients(info: ConnectionInfo) -> int:
    """How many clients are connected; of an engine on another machine it is not known, and 0."""
    if info.keys is not None:
        return _count_connections(info) if info.is_here else 0
    return sum(_listens(path) for path in Path(info.run_dir).glob("c-*.in"))


def _count_connections(info: ConnectionInfo) -> int:
    """Connections to the socket that each client has one to. A stranger's counts until it is refused."""
    port = port_of(info.address("host.sock"))
    with contextlib.suppress(psutil.Error):
        connections = psutil.Process(info.host_pid).net_connections("tcp")
        return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in connections)
    return 0


def _listing(info: ConnectionInfo) -> EngineListing:
    processes = session_processes(info)
    memory = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory += process.memory_info().rss
    state = "dead" if not info.host_alive else "ready" if info.ready else "starting"
    if not info.is_here:
        state = "elsewhere"
    return EngineListing(info, state, count_clients(info), [p.pid for p in processes], memory)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_CONNECT_TIMEOUT)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def _kill_orphans() -> list[int]:
    """Kill engine cores and workers of this user whose host is gone, and that do not end by themselves as they should."""
    orphans = _find_orphans()
    wait_until(lambda: not any(map(is_running, orphans)), ORPHAN_GRACE)
    return kill_processes(filter(is_running, orphans))


def _find_orphans() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(
            psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError
        ):
            if _is_inside_engine(process) and _leader_is_gone(process):
                found.append(process)
    return found


def _is_inside_engine(process: psutil.Process) -> bool:
    command = " ".join(process.cmdline())
    return process.uids().real == os.getuid() and _INSIDE_ENGINE.search(command) is not None


def _leader_is_gone(process: psutil.Process) -> bool:
    leader = os.getsid(process.pid)
    return not psutil.pid_exists(leader) or psutil.Process(leader).status() == psutil.STATUS_ZOMBIE


def _remove_stray_dirs() -> list[str]:
    parents = {os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"}
    removed = []
    for parent in filter(None, parents):
        for path in Path(parent).glob("nbe-*"):
            if _is_stray(path):
                info = read_connection(engine_file(path))
                remove_engine_files(info)
                removed.append(str(path))
    return removed


def _is_stray(path: Path) -> bool:
    try:
        status = path.lstat()
        if not _RUN_DIR.fullmatch(path.name) or status.st_uid != os.getuid():
            return False
        if time.time() - status.st_mtime < _YOUNG:
            return False
        info = read_connection(engine_file(path))
    except (OSError, NBEngineError):
        return False
    lives = info.host_alive if info.keys is not None else _listens(path / "host.sock")
    return info.run_dir == str(path) and not lives
