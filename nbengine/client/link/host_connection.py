"""A client's connection to the engine's host, which may break over a network."""

from __future__ import annotations

import contextlib
import math
import time
from functools import partial

import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc.connection_watch import ConnectionWatch
from nbengine.ipc.control_messages import ClientToHost
from nbengine.ipc.handshake import encode_control
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import is_tcp
from nbengine.runtime.connection import ConnectionInfo


class HostConnection:
    """A DEALER and, over a network, a watch on it, both registered with `poller`.

    It is for one thread at a time.
    """

    def __init__(self, info: ConnectionInfo, poller: zmq.Poller, linger: int) -> None:
        self.address = info.address("host.sock")
        self.unreachable_at = math.inf
        """The time to give the host up, on the monotonic clock:
        a connection may be missing for half a lease."""
        self._context = info.make_context()
        self._poller = poller
        self._linger = linger
        self._patience = info.config.lease / 2
        self._num_connections = 0
        self._stands = False
        self._broke = False
        self._watch: ConnectionWatch | None = None
        self.socket = self._open()

    def look(self, now: float) -> bool:
        """Return whether a connection that stood has broken; `reopen` resets that."""
        for stands in [] if self._watch is None else self._watch.read():
            self._broke = self._broke or (not stands and self._stands)
            self._stands = stands
            self.unreachable_at = math.inf if stands else min(self.unreachable_at, now + self._patience)
        return self._broke

    def send(self, message: ClientToHost) -> None:
        """Send a message, without waiting.

        It is lost where the host has turned the connection down, as it does with wrong keys: the socket has nobody
        to send to then, and `unreachable_at` comes.
        """
        with contextlib.suppress(zmq.Again):
            self.socket.send(encode_control(message), zmq.NOBLOCK)

    def reopen(self) -> None:
        """Connect again after the connection broke: messages on their way may be lost, in both directions.

        Raises:
            NBEngineError: no descriptor is left for it; nothing has changed.
        """
        old, old_watch = self.socket, self._watch
        self.socket = self._open()
        self._close_socket(old, old_watch, linger=0)
        self._broke = False

    def close(self) -> None:
        """Close the socket, its watch and its context."""
        self._close_socket(self.socket, self._watch, self._linger)
        self._context.term()

    def _open(self) -> zmq.Socket[bytes]:
        watch = prepare = None
        if is_tcp(self.address):
            self._num_connections += 1
            name = f"host-{self._num_connections}"
            try:
                watch = ConnectionWatch(self._context, name)
            except zmq.ZMQError as error:
                raise NBEngineError(f"the connection to {self.address} cannot be watched: {error}") from error
            # Before it connects: a connection that stands already would never be told of.
            prepare = partial(ConnectionWatch.announce, name=name)
        try:
            socket = make_socket(self._context, self.address, zmq.DEALER, bind=False, prepare=prepare)
        except BaseException:
            if watch is not None:
                watch.close()
            raise
        if watch is not None:
            self._watch = watch
            self._stands = False
            self.unreachable_at = time.monotonic() + self._patience
            self._poller.register(watch.socket, zmq.POLLIN)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _close_socket(self, socket: zmq.Socket[bytes], watch: ConnectionWatch | None, linger: int) -> None:
        self._poller.unregister(socket)
        if watch is not None:
            ConnectionWatch.withdraw(socket)
            self._poller.unregister(watch.socket)
            watch.close()
        socket.close(linger=linger)
