"""Run directories and connection files: where an engine lives and how another process finds it.

A *run directory* (0700, short path) holds an engine's sockets and its configuration; its host removes it at
the end. A *connection file* (0600, in Jupyter's runtime directory, or `NBENGINE_RUNTIME_DIR`) names it; that of an
engine on a network has the addresses of its sockets and the keys to them, and may be copied to other machines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import zmq

from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.curve import CurveKeys
from nbengine.ipc.liveness import machine_id
from nbengine.ipc.transport import EngineContext, any_port, host_of, own_address

MAX_SOCKET_PATH = 100
"""Bytes that a UNIX socket path may have on every platform we care for (macOS: 104)."""
_LONGEST_SOCKET_NAME = len("c-01234567.out")
_PREFIX = "nbengine-"


class ConnectionInfo(msgspec.Struct, kw_only=True):
    """Content of a connection file; `ready` is empty until the engines take requests."""

    name: str
    run_dir: str
    log_path: str
    host_pid: int
    host_create_time: float
    config: EngineConfig
    tensor_dir: str = ""
    """See `nbengine.ipc.shm_tensors`; empty: tensors go through the sockets."""
    ready: list[EngineReady] = []
    created: float = msgspec.field(default_factory=time.time)
    machine: str = ""
    """`machine_id` of the host's; empty: this one."""
    keys: CurveKeys | None = None
    """Of an engine on a network."""
    addresses: dict[str, str] = {}
    """Of an engine on a network: where its host listens, by the sockets' names."""

    def address(self, socket_name: str) -> str:
        """ZMQ address of one of the host's sockets, to connect to.

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
        """ZMQ address that the host binds one of its sockets to."""
        if self.keys is None:
            return socket_address(self.run_dir, socket_name)
        return any_port(self.config.parallel.data_parallel_address or own_address())

    def client_bind_address(self, socket_name: str) -> str:
        """ZMQ address that a client binds one of its sockets to, on its machine's side of the way to the host."""
        if self.keys is None:
            return socket_address(self.run_dir, socket_name)
        return any_port(own_address(host_of(self.address("host.sock"))))

    def make_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """A context for sockets of this engine's."""
        return EngineContext.with_keys(self.keys, self.config.lease)

    @property
    def is_here(self) -> bool:
        """Whether the host is on this machine, so that its pid means something."""
        return self.machine in ("", machine_id())

    @property
    def host_alive(self) -> bool:
        """Whether the host process runs; a reused pid does not count. One on another machine is taken to."""
        return not self.is_here or process_alive(self.host_pid, self.host_create_time)


def process_alive(pid: int, create_time: float) -> bool:
    """Whether the process with this pid and start time runs (a zombie does not)."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        # The latter where a peer has sent what is no pid.
        return False


def runtime_dir() -> Path:
    """Directory of the connection files, created private to the user if it is missing."""
    configured = os.environ.get("NBENGINE_RUNTIME_DIR")
    if configured:
        path = Path(configured).expanduser()
    else:
        from jupyter_core.paths import jupyter_runtime_dir

        path = Path(jupyter_runtime_dir())
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


def log_dir() -> Path:
    """Directory of the engines' log files, which outlive the engines."""
    path = runtime_dir() / "nbengine-logs"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def connection_file(name: str) -> Path:
    """Path of the connection file of the engine called `name`."""
    return runtime_dir() / f"{_PREFIX}{name}.json"


def new_run_dir() -> Path:
    """Create a private directory whose socket paths are short enough."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for parent in candidates:
        if not parent or not os.access(parent, os.W_OK):
            continue
        path = tempfile.mkdtemp(prefix="nbe-", dir=parent)
        if len(os.fsencode(path)) + 1 + _LONGEST_SOCKET_NAME <= MAX_SOCKET_PATH:
            return Path(path)
        os.rmdir(path)
    raise NBEngineError(
        f"no directory for sockets: none of {[c for c in candidates if c]} is writable with a path under "
        f"{MAX_SOCKET_PATH - _LONGEST_SOCKET_NAME - len('/nbe-01234567')} bytes; set TMPDIR to one that is"
    )


def socket_address(run_dir: str | Path, socket_name: str) -> str:
    """ZMQ `ipc://` address of a socket in a run directory."""
    return f"ipc://{run_dir}/{socket_name}"


def write_connection(info: ConnectionInfo) -> Path:
    """Write the connection file atomically, readable by its owner alone."""
    path = connection_file(info.name)
    _write_private(path, msgspec.json.format(msgspec.json.encode(info)))
    return path


def engine_file(run_dir: str | Path) -> Path:
    """Path of the file in a run directory that an engine's processes find the engine by."""
    return Path(run_dir) / "engine.json"


def write_engine_file(info: ConnectionInfo) -> None:
    """Write the file that the engine's processes read, into the run directory, like `write_connection`."""
    _write_private(engine_file(info.run_dir), msgspec.json.encode(info))


def _write_private(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def read_connection(path: str | Path) -> ConnectionInfo:
    """Read a connection file.

    Raises:
        NBEngineError: the file is not there or is not a connection file, or has keys that others may read.
    """
    try:
        with open(path, "rb") as file:
            is_private = not os.fstat(file.fileno()).st_mode & 0o077
            info = msgspec.json.decode(file.read(), type=ConnectionInfo)
    except FileNotFoundError:
        raise NBEngineError(
            f"no engine has the connection file {path}; `%engine ps` lists the engines"
        ) from None
    except msgspec.MsgspecError as error:
        raise NBEngineError(f"{path} is not a connection file of nbengine: {error}") from None
    if info.keys is not None and not is_private:
        raise NBEngineError(
            f"other users may have read the keys in {path}; it must be its owner's alone (0600)"
        )
    return info


def newest(info: ConnectionInfo) -> ConnectionInfo:
    """What the connection file of a running engine says by now: engine cores may have joined, left or been replaced."""
    try:
        found = read_connection(connection_file(info.name))
    except NBEngineError:
        # It has ended; the last that is known of it is what was given.
        return info
    return found if found.run_dir == info.run_dir else info


def list_connections() -> list[ConnectionInfo]:
    """All engines that have a connection file, oldest first; dead ones are included."""
    found = []
    for path in runtime_dir().glob(f"{_PREFIX}*.json"):
        with contextlib.suppress(NBEngineError):
            found.append(read_connection(path))
    return sorted(found, key=lambda info: info.created)


def remove_directories(info: ConnectionInfo) -> None:
    """Remove a run directory and a tensor directory, on whichever machine they are."""
    for directory in filter(None, (info.tensor_dir, info.run_dir)):
        shutil.rmtree(directory, ignore_errors=True)


def remove_engine_files(info: ConnectionInfo) -> None:
    """Remove an engine's directories and, if it is still its own, its connection file, on the host's machine only."""
    if not info.is_here:
        return
    remove_directories(info)
    path = connection_file(info.name)
    with contextlib.suppress(NBEngineError, FileNotFoundError):
        if read_connection(path).run_dir == info.run_dir:
            path.unlink()


def remove_core_files(info: ConnectionInfo) -> None:
    """Remove what an engine core whose host is gone leaves: its directories, and on the host's machine the engine's
    files."""
    remove_directories(info)
    remove_engine_files(info)
