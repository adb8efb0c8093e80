"""The sockets beside a ring, for messages that do not fit into a chunk, and for readers on other machines.

The writer binds an XPUB socket, each reader connects a SUB socket. Each message is one frame: its number (8
bytes, little-endian), then what `nbengine/ipc/queues/frames.py` makes. A reader names itself in the topics
that it subscribes to, with which no number begins.

On one machine the socket is a file in a private directory. Pickle travels to other machines only over
connections with CURVE keys (RFC 26/CurveZMQ): a reader takes messages only from a peer that has the writer's
secret key, and only a peer that has the readers' key can connect at all.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import re
import threading
from collections.abc import Collection

import zmq

from nbengine.ipc.curve import SocketOptions
from nbengine.ipc.queues.frames import Part
from nbengine.ipc.sockets import IPC_PREFIX, make_socket
from nbengine.ipc.transport import bound_address, is_tcp

READY = 0
"""Number of the frame that says that all readers are connected; messages are numbered from 1."""
CLOSED = 2**64 - 1
"""Number of the frame that says that the writer has shut down."""
NUMBER_BYTES = 8
LINGER = 1000
"""Milliseconds that closing leaves for messages on their way to readers that are still there."""
NO_RECONNECTION = 10**9
"""Milliseconds until a connection is tried again, which is to say never: messages that were missed meanwhile
would be lost. The value that means never, -1, makes ZeroMQ throw away what was received and not yet read."""

_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_READER, _LEAVES = "reader", "leaves"
_SIGN = re.compile(rb"([\0\1])(reader|leaves) ([0-9]+)")


class Publisher:
    """The writer's socket for the readers `ranks`. It is for one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        ranks: Collection[int],
    ) -> None:
        options: SocketOptions = {zmq.XPUB_VERBOSER: 1}
        self._socket = make_socket(context, address, zmq.XPUB, bind=True, linger=LINGER, options=options)
        self.address = bound_address(self._socket)
        """The address that the readers connect to, with the port that was chosen."""
        self.missing = set(ranks)
        """Readers that have not connected yet."""
        self.left: set[int] = set()
        """Readers that have shut down."""
        self.lost: set[int] = set()
        """Readers that are gone without having shut down."""
        self._number = READY

    def look(self, timeout_ms: int = 0) -> None:
        """Take note of readers that have come and gone; wait up to `timeout_ms` for the first such event."""
        if timeout_ms and not self._socket.poll(timeout_ms):
            return
        with contextlib.suppress(zmq.Again):
            while True:
                self._note(self._socket.recv(zmq.NOBLOCK))

    def _note(self, event: bytes) -> None:
        sign = _SIGN.fullmatch(event)
        if sign is None:
            return
        came, topic, rank = sign[1] == b"\1", sign[2].decode(), int(sign[3])
        if topic == _LEAVES and came:
            self.left.add(rank)
        elif topic == _READER and came:
            self.missing.discard(rank)
        elif topic == _READER and rank not in self.left:
            self.lost.add(rank)

    def send(self, *parts: Part) -> int:
        """Queue a message for all readers, without waiting, and return its number."""
        self._number += 1
        self._socket.send(_numbered(self._number, *parts))
        return self._number

    def send_ready(self) -> None:
        """Say that all readers have connected."""
        self._socket.send(_numbered(READY))

    def send_closed(self) -> None:
        """Say that nothing more comes."""
        self._socket.send(_numbered(CLOSED))

    def unlink(self) -> None:
        """Remove the socket's file, if it has one; connections stay. Another call does nothing."""
        if self.address.startswith(IPC_PREFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address.removeprefix(IPC_PREFIX))

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self.unlink()


class Subscriber:
    """The socket of reader `rank`. It is for one thread at a time."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        rank: int,
    ) -> None:
        options: SocketOptions = {zmq.RECONNECT_IVL: NO_RECONNECTION, zmq.RECONNECT_IVL_MAX: 0}
        self.frames: list[bytes] = []
        """Frames that were received and not yet used, oldest first."""
        self._rank = rank
        self._lock = threading.Lock()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A queue that gets one token when `_take_in_for_main` is done;
        a surplus token only ends a wait early."""
        self._socket = make_socket(context, address, zmq.SUB, bind=False, options=options)
        self._monitor = self._socket.get_monitor_socket(_ENDS) if is_tcp(address) else None
        self._socket.subscribe(b"")
        self._socket.subscribe(f"{_READER} {rank}".encode())

    def receive(self, timeout_ms: int) -> bool:
        """Move what has come to `frames`, waiting up to `timeout_ms`;
        return whether `frames` holds anything."""
        with self._lock:
            has_come = self._socket.poll(0 if self.frames else timeout_ms)
        if has_come:
            self._take_in()
        return bool(self.frames)

    def _take_in(self) -> None:
        """Move one frame to `frames`, however often a signal handler raises meanwhile.

        pyzmq runs signal handlers between taking a frame from the socket and returning it, so that the frame
        would be lost. Only the main thread runs them: there, another thread takes the frame. The main thread
        waits for it without the classes of `threading`, whose own state an exception from a handler may
        break.
        """
        if threading.current_thread() is not threading.main_thread():
            self._take_in_here()
            return
        while not self._tokens.empty():
            self._tokens.get()
        _thread.start_new_thread(self._take_in_for_main, ())
        self._tokens.get()

    def _take_in_for_main(self) -> None:
        try:
            self._take_in_here()
        finally:
            self._tokens.put(None)

    def _take_in_here(self) -> None:
        with self._lock, contextlib.suppress(zmq.Again):
            if not self._socket.closed:
                self.frames.append(self._socket.recv(zmq.NOBLOCK))

    def drop(self, before: int) -> None:
        """Forget the frames with numbers below `before`."""
        while self.frames and number_of(self.frames[0]) < before:
            del self.frames[0]

    def disconnected(self) -> bool:
        """Return whether the connection to another machine has ended;
        what came over it before can still be received."""
        return self._monitor is not None and bool(self._monitor.poll(0))

    def close(self) -> None:
        """Close the socket; tell a writer on another machine before."""
        with self._lock:
            if self._monitor is not None:
                if not self.disconnected():
                    self._socket.subscribe(f"{_LEAVES} {self._rank}".encode())
                    self._socket.linger = LINGER
                self._socket.disable_monitor()
                self._monitor.close()
            self._socket.close()


def number_of(frame: bytes) -> int:
    """Return the number with which `frame` begins."""
    return int.from_bytes(frame[:NUMBER_BYTES], "little")


def _numbered(number: int, *parts: Part) -> bytes:
    return b"".join((number.to_bytes(NUMBER_BYTES, "little"), *parts))
