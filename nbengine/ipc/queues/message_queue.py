"""Queues that bring objects from one process to several others, over shared memory or,
to other machines, a socket.

The writer makes a `MessageQueue` and gives its handle to each reader through a private channel, such as an
inherited pipe. Each makes its end with `create_from_handle`; then all of them call `wait_until_ready`, after
which no file is left that could outlive them.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import zmq

from nbengine.checks import require, require_int
from nbengine.errors import NBEngineError
from nbengine.ipc.curve import CurveKeys, make_curve_keys
from nbengine.ipc.private import check_private
from nbengine.ipc.queues.overflow import Publisher, Subscriber
from nbengine.ipc.queues.queue_ends import LocalReader, QueueReader, QueueWriter, RemoteReader, Shared
from nbengine.ipc.queues.queue_files import new_queue_name, queue_socket_path
from nbengine.ipc.queues.shm_ring import MAX_CHUNK_BYTES, MAX_CHUNKS, RingHandle, RingReader, RingWriter
from nbengine.ipc.sockets import IPC_PREFIX
from nbengine.ipc.transport import EngineContext

Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(frozen=True, slots=True)
class LocalHandle:
    """The part of a handle that readers on the writer's machine need."""

    ring: RingHandle
    address: str


@dataclass(frozen=True, slots=True)
class RemoteHandle:
    """The part of a handle that readers on other machines need."""

    address: str
    keys: CurveKeys


@dataclass(frozen=True, slots=True)
class Handle:
    """The data that the readers need.

    It carries keys: only the readers may get it, through a channel that nobody else sees.
    """

    num_readers: int
    num_local_readers: int
    local: LocalHandle | None
    remote: RemoteHandle | None


class MessageQueue:
    """An end of a queue with one writer and `num_readers` readers, who all get every message, in order.

    The constructor makes the writer's end. The first `num_local_readers` (default: all) read from shared
    memory, the others over TCP from `remote_address`, such as `tcp://10.0.0.1:*`, encrypted and
    authenticated.

    An end takes calls from any thread, one at a time: `shutdown` ends one that waits, `close` waits for it.
    An interrupted or failed call leaves the queue usable: a message is sent to all readers on this machine or
    to none, and received once.

    Args:
        num_readers: The number of readers.
        num_local_readers: The number of those, the first ones, that run on this machine.
        directory: A private directory (0700) in memory, for the ring until all readers have attached.
        socket_directory: A private directory with a short path, for a socket until all readers have
            connected.
        remote_address: The address that readers on other machines connect to; needed if there are such
            readers.
        max_chunk_bytes: Pickled size, in bytes, up to which a message goes through shared memory.
        max_chunks: The number of messages that the writer may be ahead of the slowest reader.
        name: The name in the queue's files, for `remove_queue_files`; None: a new one.

    Raises:
        InvalidArgumentError: a number or the address is not allowed.
        NBEngineError: a directory is not private or has no room, or the address cannot be bound.
    """

    def __init__(
        self,
        num_readers: int,
        num_local_readers: int | None = None,
        *,
        directory: str | Path,
        socket_directory: str | Path,
        remote_address: str | None = None,
        max_chunk_bytes: int = MAX_CHUNK_BYTES,
        max_chunks: int = MAX_CHUNKS,
        name: str | None = None,
    ) -> None:
        name = name or new_queue_name()
        num_local = num_readers if num_local_readers is None else num_local_readers
        _check_readers(num_readers, num_local, remote_address)
        has_remote = remote_address is not None and num_local < num_readers
        keys = make_curve_keys() if has_remote else None
        context: Context = EngineContext.with_keys(keys)
        local = remote = local_handle = remote_handle = None
        with contextlib.ExitStack() as undo:
            undo.callback(context.term)
            if num_local:
                check_private(socket_directory, "the socket directory of message queues")
                ring = RingWriter(
                    directory, num_local, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks, name=name
                )
                undo.callback(ring.close)
                address = IPC_PREFIX + queue_socket_path(socket_directory, name)
                publisher = Publisher(context, address, range(num_local))
                undo.callback(publisher.close)
                local, local_handle = Shared(ring, publisher), LocalHandle(ring.handle, address)
            if remote_address is not None and keys is not None:
                remote = Publisher(context, remote_address, range(num_local, num_readers))
                remote_handle = RemoteHandle(remote.address, keys.for_clients())
            undo.pop_all()
        self._handle = Handle(num_readers, num_local, local_handle, remote_handle)
        self._set(context, QueueWriter(local, remote))

    @classmethod
    def create_from_handle(cls, handle: Handle, reader_rank: int) -> Self:
        """Make the end of reader `reader_rank`.

        Raises:
            InvalidArgumentError: the queue has no such reader.
            NBEngineError: the writer is gone, or that reader has its end already.
        """
        require_int("reader_rank", reader_rank)
        ok = 0 <= reader_rank < handle.num_readers
        require("reader_rank", reader_rank, ok, f"from 0 to {handle.num_readers - 1}")
        queue = cls.__new__(cls)
        queue._handle = handle
        context: Context = EngineContext.with_keys(None if handle.remote is None else handle.remote.keys)
        with contextlib.ExitStack() as undo:
            undo.callback(context.term)
            queue._set(context, _make_reader(context, handle, reader_rank))
            undo.pop_all()
        return queue

    def export_handle(self) -> Handle:
        """Return the handle that the readers need; it can be pickled."""
        return self._handle

    def wait_until_ready(self, timeout: float | None = None) -> None:
        """Wait until all ends have called this; to be called once, before anything else.

        Raises:
            QueueTimeoutError: some end did not within `timeout` seconds.
            QueueClosedError: this end or another has shut down.
            PeerDiedError: a process at another end is gone.
        """
        with self._busy:
            self._end.wait_until_ready(timeout)

    def enqueue(self, obj: object, timeout: float | None = None) -> None:
        """Send `obj` to all readers, waiting for room for `timeout` seconds at most.

        Raises:
            QueueTimeoutError: some reader lags behind by `max_chunks` messages; nothing was sent.
            QueueClosedError: this end or a reader has shut down.
            PeerDiedError: a reader is gone; on this machine, noticed when its room is needed.
            WireError: `obj` cannot be pickled; nothing was sent.
        """
        writer = self._end
        if not isinstance(writer, QueueWriter):
            raise NBEngineError("this is a reading end of a message queue")
        with self._busy:
            writer.enqueue(obj, timeout)

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the next message; wait for it for `timeout` seconds at most (0: not at all).

        Raises:
            QueueTimeoutError: none came.
            QueueClosedError: this end has shut down; or the writer has, and all its messages were received.
            PeerDiedError: the writer is gone, and all its messages were received.
            WireError: a message that cannot be unpickled here; it counts as received.
        """
        reader = self._end
        if not isinstance(reader, QueueReader):
            raise NBEngineError("this is the writing end of a message queue")
        with self._busy:
            reader.take(timeout)
        # CPython runs signal handlers at calls only: none can lose the message from here on.
        taken, reader.taken = reader.taken, None
        return None if taken is None else taken.obj

    def shutdown(self) -> None:
        """End the queue, from any thread; this wakes all that wait at an end on this machine.

        Another call does nothing.

        Ends on other machines learn of it from `close`.
        """
        self._end.shutdown()

    def close(self) -> None:
        """Shut down, wait for a call that is under way to end, and let go of everything.

        Another call does nothing.
        """
        self.shutdown()
        with self._busy:
            if not self._context.closed:
                self._end.close()
                self._context.term()

    def _set(self, context: Context, end: QueueWriter | QueueReader) -> None:
        self._context = context
        self._end = end
        self._busy = threading.Lock()


def _make_reader(context: Context, handle: Handle, rank: int) -> QueueReader:
    if handle.local is not None and rank < handle.num_local_readers:
        ring = RingReader(handle.local.ring, rank)
        try:
            return LocalReader(ring, Subscriber(context, handle.local.address, rank))
        except BaseException:
            ring.close()
            raise
    if handle.remote is None:
        raise NBEngineError(f"the handle of a message queue has nothing for reader {rank}")
    return RemoteReader(Subscriber(context, handle.remote.address, rank))


def _check_readers(num_readers: int, num_local: int, remote_address: str | None) -> None:
    require_int("num_readers", num_readers)
    require("num_readers", num_readers, num_readers > 0, "above 0")
    require_int("num_local_readers", num_local)
    require("num_local_readers", num_local, 0 <= num_local <= num_readers, f"from 0 to {num_readers}")
    if num_local < num_readers:
        ok = remote_address is not None and remote_address.startswith("tcp://")
        require(
            "remote_address", remote_address, ok, "a tcp:// address when some readers are on other machines"
        )
