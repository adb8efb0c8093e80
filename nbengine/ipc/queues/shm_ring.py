"""A ring of chunks in shared memory: one process writes, a fixed number of others read every message.

    data:     chunk 0 | chunk 1 | … | chunk C-1                      max_chunk_bytes each
    metadata: [written | read 0 | … | read N-1] of chunk 0, of chunk 1, …   a byte each
    closed:   a byte an end: the writer, reader 0, …
    ends:     a cache line an end: its wake word, its pid and when it started

What the flags of a chunk say:

    0 ? … ?   nobody may read it: the writer may fill it, or is doing so
    1 0 … 0   just written: every reader may read it
    1 ? … ?   read by those whose flag is 1
    1 1 … 1   read by all: the writer may fill it again

The writer owns `written`, each reader its own flag between two writings, so no lock is needed, only an order.

To write: `written` to 0; fence; fill the chunk; the readers' flags to 0; fence; `written` to 1. The other way
round, 1 0 … 0 would be seen while the chunk holds the last message or a torn one. To read: see the own flag
0; fence; see `written` 1; fence; read; fence; own flag to 1. The other way round, a reader could see
`written` of the last message and, since the writer has gone on between its two looks, its own flag for the
next, which is still being filled. Then, either way: fence, and wake the ends that sleep
(`nbengine/ipc/queues/waiting.py`).
`tests/unit/ipc/ring_explorer.py` goes through every interleaving.

The memory is a file of its owner's alone (0600), in a directory that is private too, whose pages are reserved
when it is made: a `/dev/shm` that is too small is an error then, not a SIGBUS later. The file can be unlinked
when all readers have mapped it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbengine.checks import require, require_int
from nbengine.errors import NBEngineError, PeerDiedError, QueueClosedError, QueueTimeoutError
from nbengine.ipc.liveness import ProcessIdentity, ProcessWatch, this_process
from nbengine.ipc.private import check_private, make_shared, map_shared
from nbengine.ipc.queues.queue_files import new_queue_name, ring_path
from nbengine.ipc.queues.waiting import Fence, Waiter, WakeWord

MAX_CHUNK_BYTES = 1 << 20
"""Bytes of a chunk. The plan of a decoding step of 256 requests has 16 KB,
a prompt of 32,000 tokens 130 KB."""
MAX_CHUNKS = 8
"""Chunks of a ring: several such rings fit into the 64 MiB that a container's `/dev/shm` usually has."""
_LINE = 64
_PID, _STARTED = 8, 16
_WRITER = 0


@dataclass(frozen=True, slots=True)
class RingHandle:
    """The data that a reader needs to attach; no other user's process may get it."""

    path: str
    num_readers: int
    max_chunk_bytes: int
    max_chunks: int

    @property
    def metadata(self) -> int:
        """Return the offset of the first chunk's flags."""
        return self.max_chunk_bytes * self.max_chunks

    @property
    def closed(self) -> int:
        """Return the offset of the ends' closed flags."""
        return _aligned(self.metadata + self.max_chunks * (1 + self.num_readers))

    @property
    def ends(self) -> int:
        """Return the offset of the writer's line; those of the readers follow."""
        return self.closed + _aligned(1 + self.num_readers)

    @property
    def size(self) -> int:
        """Return the bytes of the file."""
        return self.ends + _LINE * (1 + self.num_readers)


class ShmRingBuffer(ABC):
    """The common part of a ring's ends: the mapped memory, waking and being woken, and shutting down.

    An end belongs to one thread at a time; `shutdown` may come from any.
    """

    awaited: str
    """The thing that this end waits for, in words."""

    def __init__(self, handle: RingHandle, memory: mmap.mmap, end: int) -> None:
        self.handle = handle
        self.position = 0
        """The number of messages that this end has written, or read and given back."""
        self._memory = memory
        self._end = end
        self._fence = Fence()
        ends = range(1 + handle.num_readers)
        flags = range(handle.metadata, handle.metadata + handle.max_chunks * len(ends), len(ends))
        self._flags = list(flags)
        """The offset of each chunk's flags."""
        self._closed = range(handle.closed, handle.closed + len(ends))
        """The offset of each end's closed flag."""
        self._words = [WakeWord(memory, handle.ends + _LINE * index) for index in ends]
        size = handle.max_chunk_bytes
        with memoryview(memory) as data:
            self._chunks = [data[size * index : size * (index + 1)] for index in range(handle.max_chunks)]
        self._waiter = Waiter(self._words[end], self._fence, self.find_dead)
        self._watches: dict[int, ProcessWatch] = {}
        self._unmapping = threading.Lock()
        self._mapped = True
        if self._signature(end).pid:
            raise NBEngineError(f"an end of the message queue {handle.path} was taken before")
        self._sign()

    def shutdown(self) -> None:
        """End the use of the ring at this end, and tell the others; this wakes all that wait, here too."""
        with self._unmapping:
            if self._mapped:
                self._memory[self._closed[self._end]] = 1
                self._fence()
                for word in self._words:
                    word.wake()

    def close(self) -> None:
        """Shut down and let go of the memory; no other thread may be writing or reading.

        Another call does nothing.
        """
        self.shutdown()
        with self._unmapping:
            if not self._mapped:
                return
            self._mapped = False
            for chunk in self._chunks:
                chunk.release()
            for word in self._words:
                word.release()
            for watch in self._watches.values():
                watch.close()
            # A traceback may still hold a part of a chunk; the memory goes with the last of them.
            with contextlib.suppress(BufferError):
                self._memory.close()

    def find_dead(self) -> PeerDiedError | None:
        """Return the error to raise if a process that this end waits for is gone."""
        for end in self._others():
            watch = self._watches.get(end)
            if watch is None:
                process = self._signature(end)
                if process.pid == 0:
                    continue
                watch = self._watches[end] = ProcessWatch(process)
            if watch.gone():
                name = f"reader {end - 1}" if end else "the writer"
                return PeerDiedError(f"{name} of a message queue is gone: process {watch.pid} has ended")
        return None

    @abstractmethod
    def _others(self) -> Sequence[int]:
        """Return the ends that this one waits for."""

    def _sign(self) -> None:
        """Write down that this process is at this end."""
        place = self.handle.ends + _LINE * self._end
        process = this_process()
        struct.pack_into("=q", self._memory, place + _STARTED, process.started)
        self._fence()
        struct.pack_into("=q", self._memory, place + _PID, process.pid)

    def _signature(self, end: int) -> ProcessIdentity:
        """Return the process at `end`; its pid is 0 while no process is there."""
        place = self.handle.ends + _LINE * end
        (pid,) = struct.unpack_from("=q", self._memory, place + _PID)
        self._fence()
        (started,) = struct.unpack_from("=q", self._memory, place + _STARTED)
        return ProcessIdentity(pid, started)

    def _written(self) -> int:
        """Return the offset of the next chunk's flags."""
        return self._flags[self.position % len(self._flags)]

    def _chunk(self) -> memoryview:
        return self._chunks[self.position % len(self._chunks)]

    def _check_open(self) -> None:
        if not self._mapped or self._memory[self._closed[self._end]]:
            raise QueueClosedError("this end of a message queue has shut down")

    def _wait(self, ready: Callable[[], bool], timeout: float | None) -> None:
        if not self._waiter.wait(ready, timeout):
            raise QueueTimeoutError(f"a message queue had no {self.awaited} within {timeout} s")


class RingWriter(ShmRingBuffer):
    """The writing end of a ring, which makes the ring and its file.

    Raises:
        InvalidArgumentError: a number is not above 0.
        NBEngineError: `directory` does not exist, is not this user's alone, or has no room.
    """

    awaited = "free chunk"

    def __init__(
        self,
        directory: str | Path,
        num_readers: int,
        *,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        name: str | None = None,
    ) -> None:
        sizes = {"num_readers": num_readers, "max_chunk_bytes": max_chunk_bytes, "max_chunks": max_chunks}
        for argument, value in sizes.items():
            require_int(argument, value)
            require(argument, value, value > 0, "above 0")
        path = ring_path(directory, name or new_queue_name())
        handle = RingHandle(path, num_readers, _aligned(max_chunk_bytes), max_chunks)
        super().__init__(handle, _make_file(directory, handle), _WRITER)
        self._writing = _Writing(self)

    def acquire_write(self, timeout: float | None = None) -> _Writing:
        """Wait for a free chunk, to be filled in a `with` block.

        It is published at the block's end, unless that is an exception.

        Raises:
            QueueTimeoutError: all chunks hold messages that some reader has not read, for `timeout` seconds.
            QueueClosedError: this end or a reader has shut down.
            PeerDiedError: a reader is gone, and the chunk waits for one.
        """
        self._check_open()
        if not self._writable():
            self._wait(self._writable, timeout)
            self._check_open()
        if (reader := self._closed_reader()) >= 0:
            raise QueueClosedError(f"reader {reader} of a message queue has shut down")
        self._memory[self._written()] = 0
        self._fence()
        return self._writing

    def publish(self) -> None:
        """Let the readers read the acquired chunk."""
        memory, written = self._memory, self._written()
        for reader in range(self.handle.num_readers):
            memory[written + 1 + reader] = 0
        self._fence()
        # CPython runs signal handlers at calls and backward jumps only: a message that is out is always
        # counted.
        memory[written] = 1
        self.position += 1
        self._fence()
        for end in self._others():
            self._words[end].wake()

    def unlink(self) -> None:
        """Remove the file; processes that have mapped it keep the memory. Another call does nothing."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.handle.path)

    def close(self) -> None:
        """Shut down, let go of the memory and remove the file; no other thread may be writing."""
        super().close()
        self.unlink()

    def _others(self) -> Sequence[int]:
        return range(1, 1 + self.handle.num_readers)

    def _writable(self) -> bool:
        memory, written = self._memory, self._written()
        if not memory[written] or memory.find(b"\0", written + 1, written + 1 + self.handle.num_readers) < 0:
            return True
        return memory[self._closed[_WRITER]] != 0 or self._closed_reader() >= 0

    def _closed_reader(self) -> int:
        """Return a reader that has shut down, below 0 if none has."""
        return self._memory.find(b"\1", self._closed[1], self._closed.stop) - self._closed[1]


class RingReader(ShmRingBuffer):
    """The reading end of a ring for the reader `reader_rank`.

    Raises:
        InvalidArgumentError: the ring has no such reader.
        NBEngineError: the file does not exist or is not what `handle` says, or that reader has attached
            before.
    """

    awaited = "message"

    def __init__(self, handle: RingHandle, reader_rank: int) -> None:
        ranks = range(handle.num_readers)
        require("reader_rank", reader_rank, reader_rank in ranks, f"from 0 to {handle.num_readers - 1}")
        super().__init__(handle, _map_file(handle), 1 + reader_rank)
        self._reading = _Reading(self)

    def acquire_read(self, timeout: float | None = None) -> _Reading:
        """Wait for the next message, to be read in a `with` block, at whose end the chunk is given back.

        An `Exception` counts as having read it. After a `KeyboardInterrupt` the message is still there.

        Raises:
            QueueTimeoutError: none came within `timeout` seconds.
            QueueClosedError: this end has shut down; or the writer has, and all its messages are read.
            PeerDiedError: the writer is gone, and all its messages are read.
        """
        self._check_open()
        if not self._readable():
            self._wait(self._readable_or_closed, timeout)
            self._check_open()
            self._fence()
            if not self._readable():
                raise _writer_closed()
        self._fence()
        return self._reading

    def release_read(self) -> None:
        """Give the acquired chunk back."""
        self._fence()
        # No signal handler runs between these two; see `publish`.
        self._memory[self._written() + self._end] = 1
        self.position += 1
        self._fence()
        self._words[_WRITER].wake()

    def writer_end(self) -> QueueClosedError | PeerDiedError | None:
        """Return the error to raise if the writer has shut down or is gone, and nothing more comes."""
        return _writer_closed() if self._memory[self._closed[_WRITER]] else self.find_dead()

    def _others(self) -> Sequence[int]:
        return (_WRITER,)

    def _readable(self) -> bool:
        memory, written = self._memory, self._written()
        if memory[written + self._end]:
            return False
        self._fence()
        return memory[written] == 1

    def _readable_or_closed(self) -> bool:
        memory, closed = self._memory, self._closed
        return self._readable() or memory[closed[_WRITER]] != 0 or memory[closed[self._end]] != 0


class _Writing:
    """The `with` block in which a chunk is filled."""

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring

    def __enter__(self) -> memoryview:
        return self._ring._chunk()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._ring.publish()


class _Reading:
    """The `with` block in which a chunk is read."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring

    def __enter__(self) -> memoryview:
        return self._ring._chunk()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._ring.release_read()


def _writer_closed() -> QueueClosedError:
    return QueueClosedError("the writer of a message queue has shut down")


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE


def _make_file(directory: str | Path, handle: RingHandle) -> mmap.mmap:
    check_private(directory, "the directory of message queues")
    try:
        return make_shared(handle.path, handle.size)
    except OSError as error:
        raise NBEngineError(
            f"no room for a message queue of {handle.size >> 10} KiB in {directory}: {error}; "
            "in a container, /dev/shm may need to be larger (docker run --shm-size)"
        ) from error


def _map_file(handle: RingHandle) -> mmap.mmap:
    try:
        return map_shared(handle.path, handle.size)
    except OSError as error:
        raise NBEngineError(f"cannot attach to the message queue {handle.path}: {error}") from error
