"""The way of large tensors past the sockets: through a file in shared memory;
a message names each one's place.

A sender has one file, its *arena*, in the engine's *tensor directory* (0700, in `/dev/shm` where there is
one). It copies a tensor into the next free slot, and the receiver copies it out and marks the slot free. The
file is kept for all tensors, since new pages would cost more than a socket does. An arena takes up to
`ARENA_BYTES`; a tensor that does not fit goes through the socket.

Names begin with the sender's client index, so that the arena of a client that is gone can be told from others
(`remove_abandoned`), and go on with 128 random bits. The receiver trusts nothing: a handle names a file, no
path, and the slot must hold the handle's ticket. It reads instead of mapping, since a sender that cuts a
mapped file short would end it by SIGBUS.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from nbengine.errors import WireError
from nbengine.ipc.private import check_private, opened, opened_directory

logger = logging.getLogger(__name__)

OOB_SIZE_THRESHOLD = 256 << 10
"""Bytes from which on a slot costs less than a frame; measured by `benchmarks/bench_serial.py`."""
ARENA_BYTES = 64 << 20
_ALIGNMENT = 64
_HEADER_BYTES = 64
"""A slot's header: its ticket (8 bytes, little-endian), 0 when the slot is free."""
_FREE = bytes(8)
_NAME = re.compile(r"([0-9]{1,19})-[0-9a-f]{32}")


class TensorHandle(msgspec.Struct, forbid_unknown_fields=True):
    """The place of a tensor in an arena, as a message names it:
    the file, the slot, and the ticket that is good once."""

    name: str
    offset: int
    ticket: int

    @property
    def mark(self) -> bytes:
        """Return the bytes with which the slot's header begins."""
        return self.ticket.to_bytes(8, "little")


def remove_abandoned(directory: str | Path, live: Collection[int]) -> None:
    """Remove the arenas of all clients but those with an index in `live`; what cannot be removed stays."""
    with contextlib.suppress(OSError), opened_directory(directory) as descriptor:
        for name in os.listdir(descriptor):
            match = _NAME.fullmatch(name)
            if match is not None and int(match[1]) not in live:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=descriptor)


class ShmTensorSender:
    """The sending end (an `OOBTensorConsumer`): it takes tensors from `threshold` bytes up, if they fit.

    It is safe on any thread.

    Raises:
        NBEngineError: `directory` is not a directory that is this user's alone.
    """

    def __init__(
        self,
        directory: str | Path,
        client_index: int,
        *,
        threshold: int = OOB_SIZE_THRESHOLD,
        capacity: int = ARENA_BYTES,
    ) -> None:
        check_private(directory, "the tensor directory")
        self._name = f"{client_index}-{secrets.token_hex(16)}"
        self._path = os.path.join(directory, self._name)
        self._threshold = threshold
        self._capacity = capacity
        self._lock = threading.Lock()
        self._closed = False
        self._has_room = True
        self._arena: _Arena | None = None

    def __call__(self, data: memoryview) -> dict[str, Any] | None:
        """Copy `data` into a slot and return its handle; None when it is small or there is no room."""
        if data.nbytes < self._threshold:
            return None
        with self._lock:
            if self._closed:
                return None
            try:
                if self._arena is None:
                    self._arena = _Arena(self._path, self._capacity)
                place = self._arena.place(data)
            except OSError as error:
                if self._has_room:
                    logger.warning("large tensors go through the socket, not shared memory: %s", error)
                self._has_room = False
                return None
            self._has_room = True
        return None if place is None else {"name": self._name, "offset": place[0], "ticket": place[1]}

    def discard(self, handle: dict[str, Any]) -> None:
        """Free the slot of a handle that will not be sent."""
        with self._lock:
            if self._arena is not None:
                self._arena.free(handle["offset"])

    def close(self) -> None:
        """Take nothing more, and remove what has not been received; another call does nothing."""
        with self._lock:
            self._closed = True
            if self._arena is not None:
                self._arena.close()
                self._arena = None


class ShmTensorReceiver:
    """The receiving end (an `OOBTensorProvider`)."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = directory

    def __call__(self, num_bytes: int, handle: dict[str, Any]) -> bytearray:
        """Read the slot that `handle` stands for, and free it.

        Raises:
            WireError: the slot does not exist, or does not hold what the message says.
        """
        place = _checked(handle)
        try:
            with self._opened(place, num_bytes) as descriptor:
                header, data = bytearray(_HEADER_BYTES), bytearray(num_bytes)
                # If the file is cut short now, too little is read.
                count = os.preadv(descriptor, [header, data], place.offset)
                if count != _HEADER_BYTES + num_bytes or header[:8] != place.mark:
                    _refuse(place, "its ticket is not good (any more)")
                os.pwrite(descriptor, _FREE, place.offset)
                return data
        except OSError as error:
            _refuse(place, str(error))

    def discard(self, handle: dict[str, Any]) -> None:
        """Free the slot that `handle` stands for, if any."""
        with contextlib.suppress(WireError, OSError):
            place = _checked(handle)
            with self._opened(place, 1) as descriptor:
                if os.pread(descriptor, 8, place.offset) == place.mark:
                    os.pwrite(descriptor, _FREE, place.offset)

    @contextlib.contextmanager
    def _opened(self, place: TensorHandle, num_bytes: int) -> Iterator[int]:
        """Open the arena, which must be a plain file of this user's, with no other name,
        that has the slot."""
        # Without O_NONBLOCK, opening a FIFO would wait for the other end.
        with opened(os.path.join(self._directory, place.name), os.O_NONBLOCK) as descriptor:
            status = os.fstat(descriptor)
            plain = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
            if not plain or not 0 < num_bytes <= status.st_size - place.offset - _HEADER_BYTES:
                _refuse(place, f"no arena with {num_bytes} bytes there")
            yield descriptor


class _Arena:
    """A file of `capacity` bytes, used as a ring of slots:
    they are freed in any order, and taken again in ring order.

    Its pages are allocated when they are first needed, and kept.
    """

    def __init__(self, path: str, capacity: int) -> None:
        self._path = path
        self._capacity = capacity
        self._slots: deque[int] = deque()
        self._head = 0
        self._allocated = 0
        self._tickets = 0
        with opened(path, os.O_CREAT | os.O_EXCL) as descriptor:
            try:
                os.ftruncate(descriptor, capacity)
                self._map = mmap.mmap(descriptor, capacity)
            except BaseException:
                os.unlink(path)
                raise

    def place(self, data: memoryview) -> tuple[int, int] | None:
        """Copy `data` into a slot and return its offset and its ticket, None if no free slot is large enough.

        Raises:
            OSError: there is no memory for it.
        """
        size = _HEADER_BYTES + -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
        offset = self._find(size)
        if offset is None:
            return None
        end = offset + size
        if end > self._allocated:
            # Writing to a page that cannot be had would be a SIGBUS.
            with opened(self._path) as descriptor:
                os.posix_fallocate(descriptor, self._allocated, end - self._allocated)
            self._allocated = end
        self._tickets += 1
        start = offset + _HEADER_BYTES
        self._map[start : start + data.nbytes] = data
        self._map[offset : offset + 8] = self._tickets.to_bytes(8, "little")
        self._slots.append(offset)
        self._head = end
        return offset, self._tickets

    def free(self, offset: int) -> None:
        """Mark a slot free."""
        self._map[offset : offset + 8] = _FREE

    def close(self) -> None:
        """Remove the file, and give its memory back."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._map.close()

    def _find(self, size: int) -> int | None:
        slots = self._slots
        while slots and self._map[slots[0] : slots[0] + 8] == _FREE:
            slots.popleft()
        if not slots:
            start, limit = 0, self._capacity
        elif self._head > slots[0]:
            start, limit = self._head, self._capacity
            if limit - start < size:
                start, limit = 0, slots[0]
        else:
            start, limit = self._head, slots[0]
        return start if size <= limit - start else None


def _checked(handle: dict[str, Any]) -> TensorHandle:
    try:
        place = msgspec.convert(handle, TensorHandle)
    except msgspec.ValidationError as error:
        raise WireError(f"not a handle of an out-of-band tensor: {error}") from None
    aligned = place.offset >= 0 and place.offset % _ALIGNMENT == 0
    if not _NAME.fullmatch(place.name) or not aligned or not 0 < place.ticket < 2**63:
        raise WireError(f"not a handle of an out-of-band tensor: {place}")
    return place


def _refuse(place: TensorHandle, reason: str) -> NoReturn:
    raise WireError(f"the out-of-band tensor {place.ticket} in {place.name[:40]} cannot be read: {reason}")
