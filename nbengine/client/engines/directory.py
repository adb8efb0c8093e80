"""The engines of this user: this module lists, finds and ends them, and clears away what dead ones left."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import zmq

from nbengine.client.engines.launch import bury_child, reap_children
from nbengine.client.engines.processes import (
    kill_processes,
    kill_session,
    resident_bytes,
    session_processes,
    wait_for_host,
    wait_until,
)
from nbengine.errors import InvalidTypeError, NBEngineError, quoted
from nbengine.ipc.control_messages import EngineDead, HostToClient, Shutdown
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.liveness import ProcessIdentity, ProcessState, identity_of, is_alive, send_signal
from nbengine.ipc.private import is_private_directory
from nbengine.ipc.process_state import what_holds
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import port_of
from nbengine.runtime.connection import (
    ENGINE_NAME,
    ConnectionInfo,
    connection_file,
    engine_file,
    list_connections,
    read_connection,
    remove_engine_files,
)
from nbengine.runtime.directories import RUN_DIR, places

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 10.0
"""Seconds that an engine gets to end when asked, before signals end it."""
TERMINATE_TIMEOUT = 5.0
ORPHAN_GRACE = 2.0
"""Seconds that an engine core gets to end by itself when its host is gone."""
_CONNECT_TIMEOUT = 0.2
_CLEAR_TIMEOUT = 1.0
"""Seconds that a start takes at most to look for directories that no connection file names."""
_INSIDE_ENGINE = re.compile(r"^nbengine: (core|worker) |-m nbengine\.engine (core|worker) ")
"""Command lines of an engine's processes other than its host, before and after they have taken a title.
Workers of an engine in a program's own process lead their own sessions."""


@dataclass(frozen=True, slots=True)
class EngineListing:
    """An engine as `nbengine ps` shows it.

    `memory_bytes` is the resident memory of all its processes, workers included.
    """

    info: ConnectionInfo
    state: str
    num_clients: int
    pids: list[int]
    memory_bytes: int


@dataclass(slots=True)
class ReapReport:
    """The report of what `reap` has removed or ended."""

    dead: list[str] = field(default_factory=list)
    """Names of engines that had died and left files or processes."""
    ended: list[str] = field(default_factory=list)
    """Names of running engines that had no client and were ended."""
    killed_pids: list[int] = field(default_factory=list)
    removed_dirs: list[str] = field(default_factory=list)
    """Run directories that no engine knew of."""


def find_engine(name_or_file: str | Path) -> ConnectionInfo:
    """Find the running engine with a name or connection file.

    Raises:
        NBEngineError: no such engine runs; the message lists those that do. Or the file cannot be trusted: it
            is another user's, others can write it, or it is a link.
        InvalidTypeError: `name_or_file` is neither a name nor a path.
    """
    if not isinstance(name_or_file, str | os.PathLike):
        raise InvalidTypeError("name_or_file", name_or_file, "the name of an engine, or its connection file")
    name = os.fsdecode(name_or_file)
    path: Path | None = Path(name)
    if not (name.endswith(".json") and _is_there(name)):
        path = connection_file(name) if ENGINE_NAME.fullmatch(name) else None
    if path is None or not _is_there(path):
        names = ", ".join(info.name for info in list_connections() if info.host_alive) or "none"
        raise NBEngineError(f"no engine is called {quoted(name)}; running: {names}")
    info = read_connection(path)
    if not info.host_alive:
        raise NBEngineError(
            f"engine {info.name} is dead (its host, pid {info.host_pid}, is gone); see {info.log_path}"
        )
    return info


def _is_there(path: str | Path) -> bool:
    # A text that can be no path names nothing.
    try:
        return os.path.lexists(path)
    except ValueError:
        return False


def list_engines() -> list[EngineListing]:
    """List all engines that have a connection file, oldest first, dead ones included."""
    reap_children()
    return [_listing(info) for info in list_connections()]


def stop_engine(info: ConnectionInfo, *, drain: bool = False, timeout: float = STOP_TIMEOUT) -> None:
    """End an engine, without being its client, and wait until nothing is left of it.

    It is asked first (with `drain` it may finish its requests, within `timeout` seconds), then terminated,
    then killed.

    Raises:
        NBEngineError: the engine is on another machine, where it can only be asked, and has not ended in
            time.
    """
    context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
    control = make_socket(context, info.address("host.sock"), zmq.DEALER, bind=False)
    try:
        # Where the engine has turned this process down already, nobody is there to send to.
        with contextlib.suppress(zmq.Again):
            control.send(encode_control(Shutdown(drain)), zmq.NOBLOCK)
        gone = wait_for_host(info, timeout) if info.is_here else _says_that_it_ends(control, timeout)
    finally:
        control.close()
        context.term()
    if not (gone or info.is_here):
        raise NBEngineError(f"engine {info.name} on another machine has not ended within {timeout:g} s")
    if not gone:
        for process in session_processes(info)[:1]:
            send_signal(process, signal.SIGTERM)
        wait_for_host(info, TERMINATE_TIMEOUT)
    kill_session(info)
    remove_engine_files(info)
    bury_child(info.run_dir)


def _says_that_it_ends(control: zmq.Socket[bytes], timeout: float) -> bool:
    """Wait for the last message of a host that was asked to end:
    it comes when nothing is left of the engine."""
    decoder = ControlDecoder[HostToClient](HostToClient)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if control.poll(int(left * 1000) + 1) and isinstance(decoder.decode(control.recv()), EngineDead):
            return True
    return False


def reap(*, end_unattached: bool = False) -> ReapReport:
    """Remove files and processes that dead engines have left; running engines are left alone.

    With `end_unattached`, unbound engines without clients are ended, too, however long they would still have
    waited for a client.
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


def clear_dead_engines() -> None:
    """Remove the files of engines whose processes all ended at once, so that none of them could remove them.

    Every start of an engine calls this. An engine that still has a process, or may be starting, is left for
    `reap`, and nothing is waited for.
    """
    dead = [info for info in list_connections() if info.is_here and not info.host_alive]
    strays = [info for _, info in _strays(time.monotonic() + _CLEAR_TIMEOUT)]
    orphans = bool(strays) and bool(_find_orphans())
    for info in [*dead, *([] if orphans else strays)]:
        if not session_processes(info):
            remove_engine_files(info)
            bury_child(info.run_dir)
            logger.info("removed what was left of engine %s, which had died", info.name)


def count_clients(info: ConnectionInfo) -> int:
    """Count the clients that are connected; 0 for an engine on another machine, where nobody can tell."""
    if info.is_before_boot:
        return 0
    if info.keys is not None:
        return _count_connections(info) if info.is_here else 0
    return sum(_listens(path) for path in Path(info.run_dir).glob("c-*.in"))


def _count_connections(info: ConnectionInfo) -> int:
    """Count the connections to a socket to which each client has one;
    a stranger's counts until it is refused."""
    port = port_of(info.address("host.sock"))
    with contextlib.suppress(psutil.Error):
        connections = psutil.Process(info.host_pid).net_connections("tcp")
        return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in connections)
    return 0


def _listing(info: ConnectionInfo) -> EngineListing:
    processes = session_processes(info)
    memory = sum(map(resident_bytes, processes))
    state = "dead" if not info.host_alive else "ready" if info.ready else "starting"
    if not info.is_here:
        state = "elsewhere"
    elif any(what_holds(process.pid) is ProcessState.STOPPED for process in processes):
        state = "stopped"
    elif info.stalled and info.host_alive:
        state = "stalled"
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
    """Kill this user's engine cores and workers whose host is gone, and that do not end as they should."""
    orphans = _find_orphans()
    wait_until(lambda: not any(map(is_alive, orphans)), ORPHAN_GRACE)
    return kill_processes(filter(is_alive, orphans))


def _find_orphans() -> list[ProcessIdentity]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(
            psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError, PermissionError
        ):
            process = identity_of(pid)
            if process is not None and _is_inside_engine(pid) and _leader_is_gone(pid):
                found.append(process)
    return found


def _is_inside_engine(pid: int) -> bool:
    process = psutil.Process(pid)
    if process.uids().real != os.getuid():
        return False
    return _INSIDE_ENGINE.search(" ".join(process.cmdline())) is not None


def _leader_is_gone(pid: int) -> bool:
    leader = os.getsid(pid)
    # 0: the leader is outside of this container.
    return leader != 0 and identity_of(leader) is None


def _remove_stray_dirs() -> list[str]:
    removed = []
    for path, info in _strays():
        remove_engine_files(info)
        bury_child(info.run_dir)
        if not path.exists():
            removed.append(str(path))
    return removed


def _strays(deadline: float = math.inf) -> Iterator[tuple[Path, ConnectionInfo]]:
    """Yield run directories that dead engines have left, each with its engine;
    look for no more after the deadline."""
    for parent in places():
        try:
            found = list(Path(parent).glob("nbe-*"))
        except OSError:
            # The place can hold no run directory: its name is too long, or it cannot be read.
            continue
        for path in found:
            if time.monotonic() >= deadline:
                return
            info = _stray(path)
            if info is not None:
                yield path, info


def _stray(path: Path) -> ConnectionInfo | None:
    """Return the engine that has left a run directory;
    None if it may still live, or if this is no run directory."""
    try:
        status = path.lstat()
        if not RUN_DIR.fullmatch(path.name) or not is_private_directory(status):
            return None
        info = read_connection(engine_file(path))
    except (OSError, NBEngineError):
        return None
    return info if info.run_dir == str(path) and not _is_in_use(info) else None


def _is_in_use(info: ConnectionInfo) -> bool:
    """Return whether an engine lives in its run directory, or is being started there.

    Its processes tell, since the age of a file means nothing once the clock was set.
    """
    if not info.is_here:
        # It may belong to a container with the same directory, or be from before the machine was started
        # again.
        return info.keys is not None or info.host_pid == 0 or _listens(Path(info.run_dir, "host.sock"))
    if info.host_pid or info.is_before_boot:
        return info.host_alive
    # Its host has not written its pid yet: the process that starts it waits for that, or removes the
    # directory.
    return is_alive(info.launcher) or _has_starting_host(info)


def _has_starting_host(info: ConnectionInfo) -> bool:
    title = f"nbengine: host {info.name}"
    for pid in psutil.pids():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            command = psutil.Process(pid).cmdline()
            if info.run_dir in command or " ".join(command) == title:
                return True
    return False
