"""Connection files: each says where an engine lives, so that another process finds it.

A *run directory* (0700, short path) holds an engine's sockets and its configuration; its host removes it at
the end. A *connection file* (0600, in Jupyter's runtime directory, or `NBENGINE_RUNTIME_DIR`) names it; that
of an engine on a network has the addresses of its sockets and the keys to them, and may be copied to other
machines.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import time
from pathlib import Path

import msgspec
import zmq

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError, NBEngineError, ProtocolMismatchError, shown
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.curve import CurveKeys
from nbengine.ipc.liveness import ProcessIdentity, is_alive, machine_id, was_started_again
from nbengine.ipc.private import FULL, make_own_directory, opened_directory, read_own, reason_of, write_own
from nbengine.ipc.protocol import FOR_UNNAMED, PROTOCOL, UNNAMED, client_mismatch, engine_mismatch
from nbengine.ipc.transport import EngineContext, any_port, host_of, own_address
from nbengine.runtime.directories import EngineDirectories

logger = logging.getLogger(__name__)

ENGINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_FILE_BYTES = 16 << 20
"""The most bytes that a connection file may have."""
LOG_DIR = "nbengine-logs"
_PREFIX = "nbengine-"
_REMEDY = "NBENGINE_RUNTIME_DIR chooses another directory"


class ConnectionLabel(msgspec.Struct, kw_only=True):
    """The part of a connection file that every version can read."""

    name: str
    run_dir: str
    host_pid: int
    protocol: int = UNNAMED
    log_path: str = ""
    machine: str = ""
    lasting_machine: str = ""


class ConnectionInfo(msgspec.Struct, kw_only=True):
    """Content of a connection file; `ready` is empty until the engines take requests."""

    name: str
    protocol: int = PROTOCOL
    run_dir: str
    log_path: str
    host_pid: int
    host_started: int
    config: EngineConfig
    tensor_dir: str = ""
    """The tensor directory, see `nbengine.ipc.shm_tensors`; empty: tensors go through the sockets."""
    marker: str = ""
    """The text that both directories hold, too: without it they are not removed;
    see `nbengine.runtime.directories`."""
    ready: list[EngineReady] = msgspec.field(name="cores", default_factory=list)
    for_unnamed: list[dict[str, str]] = msgspec.field(name="ready", default_factory=lambda: FOR_UNNAMED)
    """The file's field "ready", in which the first protocol had what is `ready` here:
    a text for its readers."""
    created: float = msgspec.field(default_factory=time.time)
    machine: str = ""
    """The `machine_id` of the host's machine; empty: this one."""
    lasting_machine: str = ""
    """The `lasting_machine_id` of the host's machine; empty: not known."""
    keys: CurveKeys | None = None
    """The keys of an engine on a network; None for an engine on this machine alone."""
    stalled: list[int] = []
    """Engine cores that make no progress, as far as the host knows."""
    addresses: dict[str, str] = {}
    """The addresses at which the host of an engine on a network listens, by the sockets' names."""
    metrics_address: str = ""
    """Where the host answers Prometheus, as `http://…`; empty: nowhere."""
    launcher: ProcessIdentity = ProcessIdentity(0, 0)
    """The process that starts the host, and removes everything if that fails."""

    def address(self, socket_name: str) -> str:
        """Return the ZMQ address of one of the host's sockets, to connect to.

        Raises:
            NBEngineError: the engine is on a network, and its host does not listen there yet.
        """
        if self.keys is None:
            return socket_address(self.run_dir, socket_name)
        try:
            return self.addresses[socket_name]
        except KeyError:
            raise NBEngineError(f"engine {self.name} does not listen on its {socket_name} yet") from None

    def host_bind_address(self, socket_name: str) -> str:
        """Return the ZMQ address that the host binds one of its sockets to."""
        if self.keys is None:
            return socket_address(self.run_dir, socket_name)
        return any_port(self.config.parallel.data_parallel_address or own_address())

    def client_bind_address(self, socket_name: str) -> str:
        """Return the ZMQ address that a client binds one of its sockets to,
        on its machine's side of the way to the host."""
        if self.keys is None:
            return socket_address(self.run_dir, socket_name)
        return any_port(own_address(host_of(self.address("host.sock"))))

    def make_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """Return a new context for sockets of this engine."""
        return EngineContext.with_keys(self.keys, self.config.lease)

    @property
    def is_here(self) -> bool:
        """Tell whether the host is, or was, on this machine."""
        return self.machine in ("", machine_id()) or self.is_before_boot

    @property
    def is_before_boot(self) -> bool:
        """Tell whether this machine has been started again since: nothing of the engine runs any more, and its
        pids mean nothing."""
        return was_started_again(self.machine, self.lasting_machine)

    @property
    def host(self) -> ProcessIdentity:
        """Return the host's process, which is no process if that was before this machine's boot; it means
        something only if `is_here`."""
        if self.is_before_boot:
            return ProcessIdentity(0, 0)
        return ProcessIdentity(self.host_pid, self.host_started)

    @property
    def host_alive(self) -> bool:
        """Tell whether the host runs; a reused pid does not count.

        A host on another machine is taken to run.
        """
        return not self.is_here or is_alive(self.host)


def runtime_dir() -> Path:
    """Return the directory of the connection files, created private to the user if it is missing.

    Raises:
        NBEngineError: it cannot be used, or is not this user's.
    """
    configured = os.environ.get("NBENGINE_RUNTIME_DIR")
    what = "the directory of connection files"
    try:
        if configured:
            path = Path(configured).expanduser()
        else:
            from jupyter_core.paths import jupyter_runtime_dir

            path = Path(jupyter_runtime_dir())
        # This fails for a relative path if the working directory is gone.
        path = path.absolute()
    except (OSError, RuntimeError) as error:
        where = shown(configured or "of Jupyter")
        raise NBEngineError(f"{what} {where} cannot be found: {reason_of(error)}; {_REMEDY}") from error
    return make_own_directory(path, what, _REMEDY)


def log_dir() -> Path:
    """Return the directory of the engines' log files, which outlive the engines.

    Raises:
        NBEngineError: it cannot be used, or is not this user's.
    """
    return make_own_directory(runtime_dir() / LOG_DIR, "the directory of logs", _REMEDY)


def connection_file(name: str) -> Path:
    """Return the path of the connection file of the engine called `name`."""
    return runtime_dir() / f"{_PREFIX}{name}.json"


def socket_address(run_dir: str | Path, socket_name: str) -> str:
    """Return the ZMQ `ipc://` address of a socket in a run directory."""
    return f"ipc://{run_dir}/{socket_name}"


def write_connection(info: ConnectionInfo) -> Path:
    """Write the connection file atomically, readable by its owner alone.

    Raises:
        OSError: it cannot be written; the file that was there before is still there.
    """
    path = connection_file(info.name)
    write_own(path, msgspec.json.format(msgspec.json.encode(info)))
    return path


def engine_file(run_dir: str | Path) -> Path:
    """Return the path of the file in a run directory that tells an engine's processes about the engine."""
    return Path(run_dir) / "engine.json"


def write_engine_file(info: ConnectionInfo) -> None:
    """Write the file that the engine's processes read into the run directory, like `write_connection`."""
    write_own(engine_file(info.run_dir), msgspec.json.encode(info))


def read_engine_file(run_dir: str | Path) -> ConnectionInfo:
    """Read the file that `write_engine_file` has written, in a process of the engine.

    Raises:
        NBEngineError: as `read_connection`; the process that started this one may have another version of
            nbengine.
    """
    try:
        return read_connection(engine_file(run_dir))
    except ProtocolMismatchError as error:
        engine = f"the engine in {shown(run_dir)}"
        raise ProtocolMismatchError(engine_mismatch(engine, error.theirs), error.theirs) from None


def start_error(error: OSError | ValueError) -> EngineStartError:
    """Make the error of an engine that a file or directory keeps from starting:
    it says which, why, and what to do."""
    path = getattr(error, "filename", None)
    where = f" at {shown(os.fsdecode(path))}" if isinstance(path, str | bytes) else ""
    full = isinstance(error, OSError) and error.errno in FULL | {errno.EACCES, errno.EPERM}
    hint = f"; make room there, or let it be written ({_REMEDY})" if full else ""
    return EngineStartError(f"the engine cannot be started{where}: {reason_of(error)}{hint}")


def read_connection(path: str | Path) -> ConnectionInfo:
    """Read a connection file, which must be this user's and writable by nobody else.

    Raises:
        NBEngineError: the file is not there or is not a connection file, or has keys that others may read.
        ProtocolMismatchError: it is of another version of nbengine.
    """
    return _read(path, None)[0]


def read_label(path: str | Path) -> ConnectionLabel:
    """Read the part of a connection file that all versions have, like `read_connection`."""
    return msgspec.json.decode(read_own(path, MAX_FILE_BYTES, None)[0], type=ConnectionLabel)


def _read(path: str | Path, dir_fd: int | None) -> tuple[ConnectionInfo, os.stat_result]:
    try:
        content, status = read_own(path, MAX_FILE_BYTES, dir_fd)
        _check_protocol(msgspec.json.decode(content, type=ConnectionLabel))
        info = msgspec.json.decode(content, type=ConnectionInfo)
    except FileNotFoundError:
        raise NBEngineError(
            f"no engine has the connection file {shown(path)}; `%engine ps` lists the engines"
        ) from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise NBEngineError(f"{shown(path)} is not a connection file of nbengine: {error}") from None
    if info.keys is not None and status.st_mode & 0o077:
        raise NBEngineError(
            f"other users may have read the keys in {path}; it must be its owner's alone (0600)"
        )
    problem = _problem_of(info)
    if problem:
        raise NBEngineError(f"{shown(path)} is not a connection file of nbengine: {problem}")
    return info, status


def _check_protocol(label: ConnectionLabel) -> None:
    if label.protocol != PROTOCOL:
        engine = f"engine {shown(label.name)}"
        ending = f" (`kill {label.host_pid}` ends it)"
        line = client_mismatch(engine, label.protocol, PROTOCOL, ending)
        raise ProtocolMismatchError(line, label.protocol)


def _problem_of(info: ConnectionInfo) -> str:
    """Say why the content of a connection file can be no engine's; empty if it can."""
    if not ENGINE_NAME.fullmatch(info.name):
        return f"no engine has the name {shown(info.name)}"
    if not os.path.isabs(info.run_dir) or os.path.normpath(info.run_dir) != info.run_dir:
        return f"its run_dir is {shown(info.run_dir)}"
    if any("\0" in path for path in (info.run_dir, info.tensor_dir, info.log_path)):
        return "a path in it has a null byte"
    return ""


def newest(info: ConnectionInfo) -> ConnectionInfo:
    """Read the connection file of a running engine again:
    engine cores may have joined, left or been replaced."""
    try:
        found = read_connection(connection_file(info.name))
    except NBEngineError:
        # It has ended; nothing newer than what was given is known of it.
        return info
    return found if found.run_dir == info.run_dir else info


def connection_files() -> list[Path]:
    """List the files that may be connection files of this user's engines."""
    return list(runtime_dir().glob(f"{_PREFIX}*.json"))


def list_connections() -> list[ConnectionInfo]:
    """List the engines that have a connection file of this version, oldest first; dead ones are included."""
    found = []
    for path in connection_files():
        with contextlib.suppress(NBEngineError):
            found.append(read_connection(path))
    return sorted(found, key=lambda info: info.created)


def directories_of(info: ConnectionInfo) -> EngineDirectories:
    """Return the directories that a connection file names, whether they are an engine's or not."""
    return EngineDirectories(info.run_dir, info.tensor_dir, info.marker)


def remove_engine_files(info: ConnectionInfo) -> None:
    """Remove an engine's directories and, if it is still the engine's, its connection file,
    on its host's machine.

    A file or directory that is not the engine's beyond doubt is left alone, and so is one that cannot be
    removed; the log says so.
    """
    if not info.is_here:
        return
    directories_of(info).remove()
    try:
        _remove_connection_file(info)
    except (OSError, NBEngineError) as error:
        logger.warning("the connection file of engine %s is left: %s", info.name, error)


def _remove_connection_file(info: ConnectionInfo) -> None:
    path = connection_file(info.name)
    # A file that is gone, or is nobody's connection file, is not the engine's.
    with (
        opened_directory(path.parent, follow=True) as directory,
        contextlib.suppress(NBEngineError, FileNotFoundError),
    ):
        found, status = _read(path.name, directory)
        now = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
        if found.run_dir == info.run_dir and os.path.samestat(now, status):
            os.unlink(path.name, dir_fd=directory)


def remove_core_files(info: ConnectionInfo) -> None:
    """Remove the files of an engine core whose host is gone:
    its directories, and on the host's machine the engine's files."""
    directories_of(info).remove()
    remove_engine_files(info)
