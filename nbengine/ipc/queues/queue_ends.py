"""The ends of a message queue, over a ring in shared memory and the sockets beside it.

A chunk begins with a byte that says what follows: a message, or the number of the frame that brings it over
the socket.

A reader keeps what it has decoded in `taken` until its caller has it, so that a `KeyboardInterrupt` loses
nothing: CPython runs signal handlers at calls and backward jumps only, not between two assignments.
"""

from __future__ import annotations

import struct
import time
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from nbengine.errors import PeerDiedError, QueueClosedError, QueueTimeoutError, WireError
from nbengine.ipc.queues.frames import Part, decode, encode
from nbengine.ipc.queues.overflow import CLOSED, NUMBER_BYTES, READY, Publisher, Subscriber, number_of
from nbengine.ipc.queues.shm_ring import RingReader, RingWriter
from nbengine.ipc.queues.waiting import LONGEST_SLEEP

_WHOLE, _ELSEWHERE = 0, 1
_NUMBER = struct.Struct("<Q")
_LOOK_MS = int(LONGEST_SLEEP * 1000)
_SETTLE_MS = 500


class Taken(NamedTuple):
    """A message that is decoded; `place` is the ring's position or the frame's number."""

    place: int
    obj: Any


class Shared(NamedTuple):
    """The writer's way to readers on its machine: the ring,
    and the socket for messages that fit into no chunk."""

    ring: RingWriter
    publisher: Publisher


class QueueWriter:
    """The writer's end: it writes to readers on this machine through `local`, to others through `remote`."""

    def __init__(self, local: Shared | None, remote: Publisher | None) -> None:
        self._local = local
        self._remote = remote
        publishers = (local and local.publisher, remote)
        self._publishers = [publisher for publisher in publishers if publisher is not None]
        self._closed = False

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait until every reader has connected, which it does after attaching; then remove the files."""
        end = _Deadline(timeout)
        self._check_readers()
        for publisher in self._publishers:
            while publisher.missing:
                if end.passed():
                    names = ", ".join(map(str, sorted(publisher.missing)))
                    raise QueueTimeoutError(
                        f"reader {names} of a message queue did not come within {timeout} s"
                    )
                publisher.look(end.next_look())
                self._check_readers()
        if self._local is not None:
            self._local.ring.unlink()
        for publisher in self._publishers:
            publisher.unlink()
            publisher.send_ready()

    def enqueue(self, obj: object, timeout: float | None) -> None:
        """Send `obj` to every reader."""
        if self._remote is not None:
            self._check_readers()
        parts = encode(obj)
        if self._local is None:
            self._send_to_remote(parts)
            return
        with self._local.ring.acquire_write(timeout) as chunk:
            if sum(map(len, parts)) < len(chunk):
                _fill(chunk, parts)
            else:
                # Sent before the chunk is published: a reader that sees the number need not wait for a dead
                # writer.
                chunk[0] = _ELSEWHERE
                _NUMBER.pack_into(chunk, 1, self._local.publisher.send(*parts))
            self._send_to_remote(parts)

    def shutdown(self) -> None:
        """End the use of this end, from any thread."""
        self._closed = True
        if self._local is not None:
            self._local.ring.shutdown()

    def close(self) -> None:
        """Tell the readers on other machines, and let go of everything."""
        if self._remote is not None:
            self._remote.send_closed()
        if self._local is not None:
            self._local.ring.close()
        for publisher in self._publishers:
            publisher.close()

    def _send_to_remote(self, parts: list[Part]) -> None:
        if self._remote is not None:
            self._remote.send(*parts)

    def _check_readers(self) -> None:
        """Raise if this end or a reader has shut down, or if a reader is gone."""
        if self._closed:
            raise QueueClosedError("this end of a message queue has shut down")
        if self._local is not None and (dead := self._local.ring.find_dead()):
            raise dead
        for publisher in self._publishers:
            publisher.look()
            if publisher.left:
                raise QueueClosedError(f"reader {min(publisher.left)} of a message queue has shut down")
            if publisher.lost:
                raise PeerDiedError(
                    f"reader {min(publisher.lost)} of a message queue is gone: its connection has ended"
                )


class QueueReader(ABC):
    """The end of one reader."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.taken: Taken | None = None
        """The message that the next dequeue returns."""
        self._subscriber = subscriber
        self._closed = False

    @abstractmethod
    def take(self, timeout: float | None) -> None:
        """Make sure that `taken` holds a message."""

    @abstractmethod
    def writer_end(self) -> QueueClosedError | PeerDiedError | None:
        """Return the error to raise if the writer has shut down or is gone, and nothing more comes."""

    def wait_until_ready(self, timeout: float | None) -> None:
        """Wait until the writer says that all readers have connected."""
        end = _Deadline(timeout)
        self.check_open()
        while not self._subscriber.receive(end.next_look()):
            self.look_around()
            if end.passed():
                raise QueueTimeoutError(f"the writer of a message queue was not ready within {timeout} s")
        if number_of(self._subscriber.frames[0]) != READY:
            raise WireError("a message queue began with a message: wait_until_ready comes first")
        del self._subscriber.frames[0]

    def check_open(self) -> None:
        """Raise if this end has shut down."""
        if self._closed:
            raise QueueClosedError("this end of a message queue has shut down")

    def look_around(self) -> None:
        """Raise if nothing will ever come; called after a while in which nothing came."""
        self.check_open()
        ended = self.writer_end()
        # The writer's last messages may still be on their way through ZeroMQ.
        if ended is not None and not self._subscriber.receive(_SETTLE_MS):
            raise ended

    def shutdown(self) -> None:
        """End the use of this end, from any thread."""
        self._closed = True

    def close(self) -> None:
        """Tell the writer, and let go of everything."""
        self._subscriber.close()


class LocalReader(QueueReader):
    """The end of a reader on the writer's machine: it reads the ring, and large messages from the socket."""

    def __init__(self, ring: RingReader, subscriber: Subscriber) -> None:
        super().__init__(subscriber)
        self._ring = ring

    def take(self, timeout: float | None) -> None:
        ring = self._ring
        if self.taken is None:
            with ring.acquire_read(timeout) as chunk:
                self.taken = Taken(ring.position, self._decode(chunk))
        elif self.taken.place == ring.position:
            # An interrupt came between decoding and giving back.
            ring.release_read()

    def writer_end(self) -> QueueClosedError | PeerDiedError | None:
        return self._ring.writer_end()

    def shutdown(self) -> None:
        super().shutdown()
        self._ring.shutdown()

    def close(self) -> None:
        self._ring.close()
        super().close()

    def _decode(self, chunk: memoryview) -> Any:
        if chunk[0] == _WHOLE:
            return decode(chunk[1:])
        (number,) = _NUMBER.unpack_from(chunk, 1)
        return decode(memoryview(self._frame(number))[NUMBER_BYTES:])

    def _frame(self, number: int) -> bytes:
        """Return the frame with `number`, which was sent before the chunk;
        earlier frames were never announced."""
        subscriber = self._subscriber
        while True:
            subscriber.drop(number)
            if subscriber.frames:
                frame = subscriber.frames[0]
                if number_of(frame) != number:
                    raise WireError(f"frame {number} of a message queue is lost")
                return frame
            if not subscriber.receive(_LOOK_MS):
                self.look_around()


class RemoteReader(QueueReader):
    """The end of a reader on another machine: it reads everything from the socket."""

    def take(self, timeout: float | None) -> None:
        if self.taken is not None:
            return
        end = _Deadline(timeout)
        frames = self._subscriber.frames
        while True:
            self.check_open()
            if self._subscriber.receive(end.next_look()):
                break
            self.look_around()
            if end.passed():
                raise QueueTimeoutError(f"a message queue had no message within {timeout} s")
        number = number_of(frames[0])
        if number == CLOSED:
            raise QueueClosedError("the writer of a message queue has shut down")
        try:
            taken = Taken(number, decode(memoryview(frames[0])[NUMBER_BYTES:]))
        except WireError:
            del frames[0]
            raise
        self.taken = taken
        del frames[0]

    def writer_end(self) -> QueueClosedError | PeerDiedError | None:
        if self._subscriber.disconnected():
            return PeerDiedError("the writer of a message queue is gone: the connection has ended")
        return None


class _Deadline:
    """An end of waiting, `timeout` seconds from now (None: never), with looks around on the way."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def next_look(self) -> int:
        """Return the milliseconds to wait until the next look around."""
        if self._end is None:
            return _LOOK_MS
        return min(_LOOK_MS, max(0, int((self._end - time.monotonic()) * 1000)))


def _fill(chunk: memoryview, parts: list[Part]) -> None:
    chunk[0] = _WHOLE
    start = 1
    for part in parts:
        end = start + len(part)
        chunk[start:end] = part
        start = end
