"""Run directories and connection files: where an engine lives and how another process finds it.

A *run directory* (0700, short path) holds an engine's sockets and its configuration; its host removes it at
the end. A *connection file* (0600, in Jupyter's runtime directory, or `NBENGINE_RUNTIME_DIR`) names it.
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

from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineReady

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

    def address(self, socket_name: str) -> str:
        """ZMQ address of one of the engine's sockets."""
        return socket_address(self.run_dir, socket_name)

    @property
    def host_alive(self) -> bool:
        """Whether the host process runs; a reused pid does not count."""
        return process_alive(self.host_pid, self.host_create_time)


def process_alive(pid: int, create_time: float) -> bool:
    """Whether the process with this pid and start time runs (a zombie does not)."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < 1.0
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
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
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(info)))
    os.replace(temporary, path)
    return path


def read_connection(path: str | Path) -> ConnectionInfo:
    """Read a connection file.

    Raises:
        NBEngineError: the file is not there or is not a connection file.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=ConnectionInfo)
    except FileNotFoundError:
        raise NBEngineError(
            f"no engine has the connection file {path}; `%engine ps` lists the engines"
        ) from None
    except msgspec.MsgspecError as error:
        raise NBEngineError(f"{path} is not a connection file of nbengine: {error}") from None


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


def remove_engine_files(info: ConnectionInfo) -> None:
    """Remove an engine's run directory, its tensor directory and, if it is still its own, its connection file."""
    for directory in filter(None, (info.tensor_dir, info.run_dir)):
        shutil.rmtree(directory, ignore_errors=True)
    path = connection_file(info.name)
    with contextlib.suppress(NBEngineError, FileNotFoundError):
        if read_connection(path).run_dir == info.run_dir:
            path.unlink()
