"""Files: real ones, in a directory of the world, on a disk that may be full."""

from __future__ import annotations

import builtins
import errno
import fcntl
import io
import os
from pathlib import Path
from typing import Any, Self

import zmq

from nbengine.ipc import shortage
from tests.simulation import state
from tests.simulation.clocks import token_hex
from tests.simulation.machine import read_proc
from tests.simulation.polling import SimPoller
from tests.simulation.processes import FIRST_NUMBER, End, Process


def check_disk(process: Process, what: str) -> None:
    """Raise an OSError if there is no room to write."""
    world = process.world
    if world.disk_full_until > world.hub.now:
        world.hub.say(f"{what}: ENOSPC")
        world.faults.note_effect("disk", process)
        raise OSError(errno.ENOSPC, "No space left on device")


class File:
    """A file that was opened for writing; a disk that is full takes a part of what is written."""

    def __init__(self, process: Process, file: Any) -> None:
        self._process = process
        self._file = file

    def write(self, data: Any) -> int:
        self._process.outside("write")
        try:
            check_disk(self._process, "write")
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return int(self._file.write(data))

    def __enter__(self) -> Self:
        self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def sim_open(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """`open`."""
    process = state.process()
    process.outside("open", opens=1)
    if isinstance(path, int):
        return os_fdopen(path, mode, *args, **kwargs)
    special = read_proc(path) if type(path) is str else None
    if special is not None:
        return io.BytesIO(special) if "b" in mode else io.StringIO(special.decode())
    writes = any(letter in mode for letter in "wax+")
    if writes and not os.path.exists(path):
        check_disk(process, "open")
    file = builtins.open(path, mode, *args, **kwargs)  # noqa: SIM115
    # It may have been opened by `os_open`; the file closes it.
    process.release_file(file.fileno())
    return File(process, file) if writes else file


def os_open(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
    """`os.open`."""
    process = state.process()
    process.outside("os.open", opens=1)
    if path == os.devnull:
        return process.open_number(End())
    if flags & os.O_CREAT:
        check_disk(process, "os.open")
    descriptor = os.open(path, flags, mode, **kwargs)
    process.hold_file(descriptor)
    return descriptor


def check_room(count: int = shortage.ROOM) -> None:
    """`shortage.check_room`, without opening anything."""
    state.process().outside("check_room", opens=count)


def os_fdopen(descriptor: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """`os.fdopen`."""
    process = state.process()
    if kwargs.get("closefd", True):
        process.release_file(descriptor)
    file = os.fdopen(descriptor, mode, *args, **kwargs)
    return File(process, file) if "w" in mode or "a" in mode else file


def os_close(number: int) -> None:
    """`os.close`."""
    process = state.process_or_none()
    if process is None or process.hub.closed:
        # A finalizer runs when the world has ended.
        return
    if number >= FIRST_NUMBER:
        process.close_number(number)
    elif number in process.real_files:
        process.release_file(number)
        os.close(number)


def os_read(number: int, size: int) -> bytes:
    """`os.read`."""
    process = state.process()
    process.outside("read")
    if number < FIRST_NUMBER:
        return os.read(number, size)
    end = process.descriptors[number]
    if not end.readable() and not end.blocks:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    poller = SimPoller()
    poller.register(end, zmq.POLLIN)
    while not end.readable():
        poller.poll()
    poller.unregister(end)
    data: bytes = end.read(size)
    return data


def os_write(number: int, data: bytes) -> int:
    """`os.write`."""
    process = state.process()
    process.outside("write")
    if number >= FIRST_NUMBER:
        written: int = process.descriptors[number].write(data)
        return written
    check_disk(process, "os.write")
    return os.write(number, data)


def os_replace(source: Any, target: Any, **kwargs: Any) -> None:
    """`os.replace`."""
    state.process().outside("replace")
    os.replace(source, target, **kwargs)


def os_rename(source: Any, target: Any, **kwargs: Any) -> None:
    """`os.rename`."""
    process = state.process()
    process.outside("rename")
    os.rename(source, target, **kwargs)
    process.world.network.name_is_back(f"ipc://{target}")


def os_readlink(path: Any, **kwargs: Any) -> str:
    """`os.readlink`."""
    return str(state.process().pid) if path == "/proc/self" else os.readlink(path, **kwargs)


def os_dup(number: int) -> int:
    """`os.dup`."""
    process = state.process()
    process.outside("dup", opens=1)
    if number >= FIRST_NUMBER:
        return process.open_number(process.descriptors[number])
    copy = os.dup(number)
    process.hold_file(copy)
    return copy


def mkdtemp(suffix: str | None = None, prefix: str | None = None, dir: Any = None) -> str:
    """`tempfile.mkdtemp`."""
    process = state.process()
    process.outside("mkdtemp")
    check_disk(process, "mkdtemp")
    if not Path(dir).is_relative_to(process.world.directory):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))
    path = os.path.join(dir, f"{prefix or ''}{token_hex(4)}{suffix or ''}")
    os.mkdir(path, 0o700)
    return path


def flock(descriptor: Any, operation: int) -> None:
    """`fcntl.flock`."""
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
            state.hub().sleep(0.005)
        else:
            return
