"""Large tensors past the sockets: each in a file of its own in shared memory, whose name the message carries.

The files lie in an engine's *tensor directory* (0700, in `/dev/shm` where there is one), which is removed with
the engine. A sender writes a file and names it in its message; the receiver reads it into memory of its own and
removes it. Names begin with the sender's client index, so that the files of a client that ended between the
two can be told from others (`remove_abandoned`), and go on with 128 random bits.

The receiver copies instead of mapping the file: a sender that cuts a mapped file short would end the receiver by
SIGBUS, and up to 4 MiB reading is no slower than the page faults of a mapping.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from nbengine.errors import NBEngineError, WireError

logger = logging.getLogger(__name__)

OOB_SIZE_THRESHOLD = 1 << 20
"""Bytes from which on a file costs less than a frame; measured by `benchmarks/bench_serial.py`."""
SHARED_MEMORY = Path("/dev/shm")
_NAME = re.compile(r"([0-9]{1,19})-[0-9a-f]{32}")


def new_tensor_dir(run_dir: Path) -> Path:
    """Create the tensor directory of the engine that lives in `run_dir`.

    It has the name of the run directory in `SHARED_MEMORY`; where that cannot be had, it lies in `run_dir`.
    """
    shared = SHARED_MEMORY / run_dir.name
    try:
        shared.mkdir(mode=0o700)
    except OSError:
        inside = run_dir / "tensors"
        inside.mkdir(mode=0o700)
        return inside
    return shared


def remove_abandoned(directory: str | Path, live: Collection[int]) -> None:
    """Remove the files of all senders but those with an index in `live`."""
    with contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is not None and int(name[1]) not in live:
                _remove(entry.path)


class ShmTensorSender:
    """The sending end (an `OOBTensorConsumer`): takes what has `threshold` bytes or more, as long as there is room.

    Safe on any thread.

    Raises:
        NBEngineError: `directory` is not a directory that is this user's alone.
    """

    def __init__(self, directory: str | Path, client_index: int, threshold: int = OOB_SIZE_THRESHOLD) -> None:
        _check_private(directory)
        self._directory = directory
        self._client_index = client_index
        self._threshold = threshold
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, data: memoryview) -> dict[str, Any] | None:
        """Write `data` to a file and return its handle; None when it is small or there is no room."""
        if data.nbytes < self._threshold:
            return None
        name = f"{self._client_index}-{secrets.token_hex(16)}"
        path = os.path.join(self._directory, name)
        with self._lock:
            if self._closed:
                return None
            try:
                _write(path, data)
            except OSError as error:
                logger.debug("%d bytes go through the socket, not shared memory: %s", data.nbytes, error)
                _remove(path)
                return None
        return {"name": name}

    def discard(self, handle: dict[str, Any]) -> None:
        """Remove the file of a handle that will not be sent."""
        _remove(_path(self._directory, handle))

    def close(self) -> None:
        """Take nothing more, and remove what has not been received."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                if name is not None and int(name[1]) == self._client_index:
                    _remove(entry.path)


class ShmTensorReceiver:
    """The receiving end (an `OOBTensorProvider`). A handle is taken to be hostile: it names a file, no path, and
    what it names must be a plain file of this user's with the expected size and no other name."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = directory

    def __call__(self, num_bytes: int, handle: dict[str, Any]) -> bytearray:
        """Read the file of `handle` and remove it.

        Raises:
            WireError: there is no such file, or it is not what the message says.
        """
        path = _path(self._directory, handle)
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise WireError(f"the out-of-band tensor {handle['name']} cannot be opened: {error}") from error
        finally:
            _remove(path)
        try:
            _check_file(os.fstat(descriptor), num_bytes)
            return _read(descriptor, num_bytes)
        except OSError as error:
            raise WireError(f"the out-of-band tensor {handle['name']} cannot be read: {error}") from error
        finally:
            os.close(descriptor)

    def discard(self, handle: dict[str, Any]) -> None:
        """Remove the file of `handle`, if it names one."""
        with contextlib.suppress(WireError):
            _remove(_path(self._directory, handle))


def _path(directory: str | Path, handle: dict[str, Any]) -> str:
    name = handle.get("name")
    if len(handle) != 1 or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise WireError(f"{str(handle)[:100]} is no handle of an out-of-band tensor")
    return os.path.join(directory, name)


def _check_private(directory: str | Path) -> None:
    try:
        status = os.lstat(directory)
    except OSError as error:
        raise NBEngineError(f"the tensor directory {directory} is not here: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NBEngineError(f"the tensor directory {directory} is not this user's alone")


def _check_file(status: os.stat_result, num_bytes: int) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise WireError("an out-of-band tensor must be in a plain file of this user's")
    # The name it was opened by is gone already.
    if status.st_nlink:
        raise WireError("the file of an out-of-band tensor must have no other name")
    if status.st_size != num_bytes or not num_bytes:
        raise WireError(f"an out-of-band tensor of {num_bytes} bytes is in a file of {status.st_size}")


def _write(path: str, data: memoryview) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


def _read(descriptor: int, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    left = memoryview(buffer)
    while left:
        count = os.readv(descriptor, [left])
        if not count:
            raise WireError("the file of an out-of-band tensor was cut short")
        left = left[count:]
    return buffer


def _remove(path: str) -> None:
    # What lies there may be a directory, or not ours to remove; it goes with the whole tensor directory.
    with contextlib.suppress(OSError):
        os.unlink(path)
