"""Starting an engine's host process."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

import nbengine
from nbengine.client.connection import (
    ConnectionInfo,
    connection_file,
    engine_file,
    list_connections,
    log_dir,
    new_run_dir,
    read_connection,
    remove_engine_files,
    runtime_dir,
    write_connection,
    write_engine_file,
)
from nbengine.client.logs import engine_log_of
from nbengine.client.processes import create_time_of, kill_session, wait_until
from nbengine.config import EngineConfig
from nbengine.engine.logs import log_tail
from nbengine.engine.processes import PARENT_FD_VARIABLE, child_environment, describe_status
from nbengine.errors import EngineStartError, InvalidArgumentError, NBEngineError
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.liveness import machine_id
from nbengine.ipc.shm_tensors import new_tensor_dir

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

KEPT_LOGS = 20
BURIAL_TIMEOUT = 2.0
LISTEN_TIMEOUT = 30.0
"""Seconds that the host of an engine on a network may take until it listens."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(slots=True)
class _Child:
    """A host that this process has started; closing `lifeline` ends it if it is bound."""

    process: subprocess.Popen[bytes]
    lifeline: int | None


_children: dict[str, _Child] = {}
"""By run directory."""


def launch_engine(config: EngineConfig, *, name: str | None = None) -> ConnectionInfo:
    """Start the host process of a new engine, which starts everything else; does not wait until it is ready.

    The model must be resolved. Without a `name` the engine is called after its model. A bound engine holds the
    read end of a pipe whose write end stays in this process, so that it sees the end of this process however it
    comes.

    Raises:
        InvalidArgumentError: `name` is malformed, or a running engine has it.
        EngineStartError: the process cannot be started.
    """
    reap_children()
    run_dir = new_run_dir()
    tensor_dir = new_tensor_dir(run_dir)
    with _removed_on_error(run_dir, tensor_dir), _launch_lock():
        chosen = _choose_name(name, config.model.model)
        info = ConnectionInfo(
            name=chosen,
            run_dir=str(run_dir),
            log_path=str(_new_log_file(chosen)),
            host_pid=0,
            host_create_time=0.0,
            config=config,
            tensor_dir=str(tensor_dir),
            machine=machine_id(),
            keys=make_curve_keys() if config.parallel.networked else None,
        )
        write_engine_file(info)
        info = _start_host(info)
        # The name must be taken before the lock is released.
        if info.keys is not None:
            info = _with_addresses(info)
        else:
            # The host writes the same.
            write_connection(info)
    return info


@contextlib.contextmanager
def discarded_on_error(info: ConnectionInfo) -> Iterator[None]:
    """Remove an engine that this process has just launched if the block ends with an exception."""
    try:
        yield
    except BaseException:
        kill_session(info)
        remove_engine_files(info)
        bury_child(info.run_dir)
        raise


def host_exit(info: ConnectionInfo) -> str | None:
    """How a host that looks gone ended, as in "was killed by …", if this process started it."""
    child = _children.get(info.run_dir)
    status = None if child is None else _status_of_gone(child)
    return None if status is None else describe_status(status)


def bury_child(run_dir: str) -> None:
    """Take note of the end of a host, if it was this process that started it, so that it is no zombie."""
    child = _children.get(run_dir)
    if child is not None:
        _status_of_gone(child)
        _forget_child(run_dir)


def _status_of_gone(child: _Child) -> int | None:
    """Exit status of a process that looks gone: its other threads may take a moment longer than the first one."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.process.wait(BURIAL_TIMEOUT)
    return None


def _forget_child(run_dir: str) -> None:
    """Let go of a host that this process started; a bound one ends if it still runs."""
    child = _children.pop(run_dir, None)
    if child is None:
        return
    if child.lifeline is not None:
        os.close(child.lifeline)
    if child.process.poll() is None:
        _children[run_dir] = _Child(child.process, None)


def reap_children() -> None:
    """`bury_child` for every host of this process that has ended."""
    for run_dir, child in list(_children.items()):
        if child.process.poll() is not None:
            _forget_child(run_dir)


def slug(model: str) -> str:
    """A name for an engine made from its model's: the last part of a path or hub id, in safe characters."""
    stem = model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return cleaned[:48] or "engine"


@contextlib.contextmanager
def _removed_on_error(run_dir: Path, tensor_dir: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        child = _children.get(str(run_dir))
        if child is not None:
            child.process.kill()
            bury_child(str(run_dir))
        for directory in (run_dir, tensor_dir):
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _start_host(info: ConnectionInfo) -> ConnectionInfo:
    lifeline: int | None = None
    inherited: tuple[int, ...] = ()
    environment = _with_package(child_environment())
    if info.config.bound:
        reader, lifeline = os.pipe()
        inherited = (reader,)
        environment[PARENT_FD_VARIABLE] = str(reader)
    try:
        with open(info.log_path, "ab") as log:
            process = subprocess.Popen(
                # -P: a file beside the notebook must not shadow a module of the engine's.
                [sys.executable, "-P", "-m", "nbengine.engine", "host", info.run_dir],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                close_fds=True,
                pass_fds=inherited,
            )
    except OSError as error:
        if lifeline is not None:
            os.close(lifeline)
        raise EngineStartError(f"the engine's host process cannot be started: {error}") from error
    finally:
        for descriptor in inherited:
            os.close(descriptor)
    _children[info.run_dir] = _Child(process, lifeline)
    created = create_time_of(process.pid)
    if created is None:
        raise EngineStartError(
            f"the engine's host process {describe_status(process.wait())} at once", log_tail(info.log_path)
        )
    return msgspec.structs.replace(info, host_pid=process.pid, host_create_time=created)


def _with_addresses(info: ConnectionInfo) -> ConnectionInfo:
    """What the host of an engine on a network has written when it listens."""
    found = info

    def listens_or_ended() -> bool:
        nonlocal found
        # Its end removes the file.
        with contextlib.suppress(NBEngineError):
            found = read_connection(engine_file(info.run_dir))
        return bool(found.addresses) or not info.host_alive

    wait_until(listens_or_ended, LISTEN_TIMEOUT)
    if not found.addresses:
        how = host_exit(info) or f"does not listen after {LISTEN_TIMEOUT:g} s"
        raise EngineStartError(f"the engine's host process {how}", log_tail(info.log_path))
    return found


def _with_package(environment: dict[str, str]) -> dict[str, str]:
    """Make sure that the child finds this package where it is not installed but lies on `sys.path`."""
    try:
        importlib.metadata.distribution("nbengine")
    except importlib.metadata.PackageNotFoundError:
        root = str(Path(nbengine.__file__).resolve().parent.parent)
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = root if not path else os.pathsep.join((root, path))
    return environment


def _choose_name(wanted: str | None, model: str) -> str:
    if wanted is not None:
        if not isinstance(wanted, str) or not _NAME.fullmatch(wanted):
            raise InvalidArgumentError(
                "name", wanted, "1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
            )
        if not _free(wanted):
            raise InvalidArgumentError(
                "name", wanted, "the name of no running engine (attach to it, or stop it)"
            )
        return wanted
    base = slug(model)
    candidate, number = base, 1
    while not _free(candidate):
        number += 1
        candidate = f"{base}-{number}"
    return candidate


def _free(name: str) -> bool:
    if not connection_file(name).exists():
        return True
    try:
        info = read_connection(connection_file(name))
    except NBEngineError:
        # Not readable as a connection file, so no engine's; the new engine's will replace it.
        return True
    if info.host_alive:
        return False
    kill_session(info)
    remove_engine_files(info)
    return True


def _new_log_file(name: str) -> Path:
    directory = log_dir()
    _drop_old_logs(directory)
    # Microseconds: an engine started anew must not find the last words of the one before in its log.
    path = directory / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def _drop_old_logs(directory: Path) -> None:
    in_use = {Path(info.log_path) for info in list_connections()}
    engine_of = {path: engine_log_of(path) for path in directory.glob("*.log")}
    logs = [path for path, engine_log in engine_of.items() if engine_log is None]
    kept = {*in_use, *sorted(logs, key=_modified, reverse=True)[: KEPT_LOGS - 1]}
    for path, engine_log in engine_of.items():
        if (engine_log or path) not in kept:
            path.unlink(missing_ok=True)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


@contextlib.contextmanager
def _launch_lock() -> Iterator[None]:
    """Keep two processes that launch at the same time from choosing the same name."""
    descriptor = os.open(runtime_dir() / "nbengine-launch.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
