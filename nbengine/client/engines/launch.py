"""The start of an engine's host process."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from nbengine.client.engines.command import host_command, host_environment
from nbengine.client.engines.logs import engine_log_of
from nbengine.client.engines.processes import kill_session, wait_until
from nbengine.client.engines.spare import take_spare
from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError, InvalidArgumentError, NBEngineError, ProtocolMismatchError
from nbengine.ipc.curve import make_curve_keys
from nbengine.ipc.liveness import identity_of, lasting_machine_id, machine_id, this_process
from nbengine.ipc.private import check_own, opened, opened_directory
from nbengine.runtime.connection import (
    ENGINE_NAME,
    ConnectionInfo,
    connection_file,
    engine_file,
    list_connections,
    log_dir,
    read_connection,
    remove_engine_files,
    runtime_dir,
    start_error,
    write_connection,
    write_engine_file,
)
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.locks import holder_of, release_lock, remedy_for, take_lock
from nbengine.runtime.logs import log_tail
from nbengine.runtime.other_protocols import other_engine, other_engines
from nbengine.runtime.processes import (
    PARENT_FD_VARIABLE,
    describe_status,
    end_signals_held,
)
from nbengine.runtime.spare import HostOrder

KEPT_LOGS = 20
BURIAL_TIMEOUT = 2.0
"""Seconds to wait for the exit status of a host that looks gone."""
LOCK_TIMEOUT = 45.0
"""Seconds that other starts may take to launch their hosts, one after the other;
more than one on a network takes."""
LISTEN_TIMEOUT = 30.0
"""Seconds in which the host of an engine on a network must listen."""


@dataclass(slots=True)
class _Child:
    """A host that this process has started; closing `lifeline` ends it if it is bound."""

    process: subprocess.Popen[bytes]
    lifeline: int | None


_children: dict[str, _Child] = {}
"""The hosts that this process has started, by run directory."""


def launch_engine(config: EngineConfig, *, name: str | None = None) -> ConnectionInfo:
    """Start the host process of a new engine, which starts everything else; do not wait until it is ready.

    The model must be resolved. Without a `name` the engine is called after its model. A bound engine holds
    the read end of a pipe whose write end stays in this process, so that it sees the end of this process in
    any case.

    Raises:
        InvalidArgumentError: `name` is malformed, or a running engine has it.
        EngineStartError: the process cannot be started, or its files cannot be made.
        NBEngineError: the directory of connection files cannot be used.
    """
    reap_children()
    with _start_errors(), _launch_lock():
        chosen = _choose_name(name, config.model.model)
        log_path = str(_new_log_file(chosen))
        keys = make_curve_keys() if config.parallel.networked else None
        # Made last: until a host runs, nobody removes them if this process is killed.
        directories = EngineDirectories.make()
        with _removed_on_error(directories):
            info = ConnectionInfo(
                name=chosen,
                run_dir=directories.run_dir,
                log_path=log_path,
                host_pid=0,
                host_started=0,
                config=config,
                tensor_dir=directories.tensor_dir,
                marker=directories.marker,
                machine=machine_id(),
                lasting_machine=lasting_machine_id(),
                keys=keys,
                launcher=this_process(),
            )
            write_engine_file(info)
            info = _start_host(info)
            # The name must be taken before the lock is released.
            if info.keys is not None:
                info = _with_addresses(info)
            else:
                # The host writes the same file.
                write_connection(info)
    return info


@contextlib.contextmanager
def discarded_on_error(info: ConnectionInfo) -> Iterator[None]:
    """Remove an engine that this process has just launched if the block ends with an exception.

    Raises:
        EngineStartError: the block has failed because the engine had ended by then; it says how.
    """
    try:
        yield
    except BaseException as error:
        end = _end_of(info) if isinstance(error, NBEngineError) else None
        kill_session(info)
        remove_engine_files(info)
        bury_child(info.run_dir)
        if end is not None:
            raise end from error
        raise


def _end_of(info: ConnectionInfo) -> EngineStartError | None:
    """Say how the engine that this process has just launched has ended; None if it runs."""
    # A host removes the directory as one of its last deeds.
    if info.host_alive and os.path.isdir(info.run_dir):
        return None
    how = host_exit(info) or "is gone"
    return EngineStartError(f"the engine's host process (pid {info.host_pid}) {how}", log_tail(info.log_path))


def host_exit(info: ConnectionInfo) -> str | None:
    """Say how a host that looks gone ended, as in "was killed by …";
    None if this process did not start it."""
    status = host_status(info)
    return None if status is None else describe_status(status)


def host_status(info: ConnectionInfo) -> int | None:
    """Return the exit status of a host that looks gone, negative for a signal; None if this process did not start
    it."""
    child = _children.get(info.run_dir)
    return None if child is None else _status_of_gone(child)


def bury_child(run_dir: str) -> None:
    """Take note of the end of a host, if this process started it, so that it does not stay a zombie."""
    child = _children.get(run_dir)
    if child is not None:
        _status_of_gone(child)
        _forget_child(run_dir)


def _status_of_gone(child: _Child) -> int | None:
    """Wait for the exit status of a host that looks gone:
    its other threads may end a moment after the first one."""
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
    """Take note of the end of every host of this process that has ended."""
    for run_dir, child in list(_children.items()):
        if child.process.poll() is not None:
            _forget_child(run_dir)


def slug(model: str) -> str:
    """Make a name for an engine from its model's: the last part of a path or hub id, in safe characters."""
    stem = model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    cleaned = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return cleaned[:48] or "engine"


@contextlib.contextmanager
def _start_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise start_error(error) from error


@contextlib.contextmanager
def _removed_on_error(directories: EngineDirectories) -> Iterator[None]:
    try:
        yield
    except BaseException:
        child = _children.get(directories.run_dir)
        if child is not None:
            child.process.kill()
            bury_child(directories.run_dir)
        directories.remove()
        raise


def _start_host(info: ConnectionInfo) -> ConnectionInfo:
    child = _spare_host(info) or _new_host(info)
    _children[info.run_dir] = child
    host = identity_of(child.process.pid)
    if host is None:
        how = describe_status(child.process.wait())
        raise EngineStartError(f"the engine's host process {how} at once", log_tail(info.log_path))
    return msgspec.structs.replace(info, host_pid=host.pid, host_started=host.started)


def _spare_host(info: ConnectionInfo) -> _Child | None:
    spare = take_spare()
    if spare is None or not spare.give(HostOrder(info.run_dir, info.log_path, info.config.bound)):
        return None
    if info.config.bound:
        return _Child(spare.process.process, spare.process.line)
    os.close(spare.process.line)
    return _Child(spare.process.process, None)


def _new_host(info: ConnectionInfo) -> _Child:
    lifeline: int | None = None
    inherited: tuple[int, ...] = ()
    environment = host_environment()
    if info.config.bound:
        reader, lifeline = os.pipe()
        inherited = (reader,)
        environment[PARENT_FD_VARIABLE] = str(reader)
    try:
        with open(info.log_path, "ab") as log, end_signals_held():
            process = subprocess.Popen(
                host_command("host", info.run_dir),
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
    return _Child(process, lifeline)


def _with_addresses(info: ConnectionInfo) -> ConnectionInfo:
    """Wait until the host of an engine on a network listens, and return what it has written."""
    found = info

    def listens_or_ended() -> bool:
        nonlocal found
        # A host that ends removes the file.
        with contextlib.suppress(NBEngineError):
            found = read_connection(engine_file(info.run_dir))
        return bool(found.addresses) or not info.host_alive

    wait_until(listens_or_ended, LISTEN_TIMEOUT)
    if not found.addresses:
        how = host_exit(info) or f"does not listen after {LISTEN_TIMEOUT:g} s"
        raise EngineStartError(f"the engine's host process {how}", log_tail(info.log_path))
    return found


def _choose_name(wanted: str | None, model: str) -> str:
    if wanted is not None:
        if not isinstance(wanted, str) or not ENGINE_NAME.fullmatch(wanted):
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
    except ProtocolMismatchError:
        other = other_engine(connection_file(name))
        return other is None or not other.may_live
    except NBEngineError:
        # It cannot be read as a connection file, so no engine has it; the new engine's will replace it.
        return True
    if info.host_alive:
        return False
    kill_session(info)
    remove_engine_files(info)
    return True


def _new_log_file(name: str) -> Path:
    directory = log_dir()
    _drop_old_logs(directory)
    # Microseconds make the name new: a restarted engine must not find the last words of the one before in its
    # log.
    path = directory / f"{name}-{datetime.now():%Y%m%d-%H%M%S-%f}.log"
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    return path


def _drop_old_logs(directory: Path) -> None:
    in_use = {Path(info.log_path) for info in list_connections()}
    in_use |= {Path(other.log_path) for other in other_engines()}
    engine_of = {path: engine_log_of(path) for path in directory.glob("*.log")}
    logs = [path for path, engine_log in engine_of.items() if engine_log is None]
    kept = {*in_use, *sorted(logs, key=_modified, reverse=True)[: KEPT_LOGS - 1]}
    with opened_directory(directory, follow=True) as descriptor:
        for path, engine_log in engine_of.items():
            if (engine_log or path) not in kept:
                # A log that cannot be removed, or is no file, may stay: nothing depends on its removal.
                with contextlib.suppress(OSError):
                    os.unlink(path.name, dir_fd=descriptor)


def _modified(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


@contextlib.contextmanager
def _launch_lock() -> Iterator[None]:
    """Keep two processes that launch at the same time from choosing the same name.

    Raises:
        EngineStartError: another process has the lock and does not let go; the message names it.
    """
    # The file is not followed if it is a link, nor waited for if it is a pipe.
    path = runtime_dir() / "nbengine-launch.lock"
    with opened(path, os.O_CREAT | os.O_NONBLOCK) as descriptor:
        check_own(descriptor, path)
        if not take_lock(descriptor, LOCK_TIMEOUT):
            raise EngineStartError(
                f"another start of an engine has kept the lock {path} for {LOCK_TIMEOUT:g} s: "
                f"{remedy_for(holder_of(descriptor))}"
            )
        try:
            yield
        finally:
            # Released by hand: a process that was forked meanwhile has the descriptor, too.
            release_lock(descriptor)


def _forget_after_fork() -> None:
    """Let go of the hosts of the parent after a fork: only the parent owns them and sees their ends."""
    while _children:
        _, child = _children.popitem()
        # Otherwise `Popen` would ask for its exit status here, where it is no child.
        child.process.returncode = 0
        if child.lifeline is not None:
            os.close(child.lifeline)


os.register_at_fork(after_in_child=_forget_after_fork)
