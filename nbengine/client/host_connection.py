"""A client's connection to the engine's host, and whether it stands."""

from __future__ import annotations

import math
import time

import zmq

from nbengine.client.connection import ConnectionInfo
from nbengine.ipc.connection_watch import ConnectionWatch
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import is_tcp


class HostConnection:
    """A DEALER and, over a network, a watch on it, both registered with `poller`. For one thread after the other."""

    def __init__(self, info: ConnectionInfo, poller: zmq.Poller, linger: int) -> None:
        self.address = info.address("host.sock")
        self.unreachable_at = math.inf
        """When to give the host up, on the monotonic clock: a connection may be missing for half a lease."""
        self._context = info.make_context()
        self._poller = poller
        self._linger = linger
        self._patience = info.config.lease / 2
        self._num_connections = 0
        self._stands = False
        self._watch: ConnectionWatch | None = None
        self.socket = self._open()

    def look(self, now: float) -> bool:
        """Whether the connection that stood at the last look has broken since."""
        for stands in [] if self._watch is None else self._watch.read():
            if not stands and self._stands:
                return True
            self._stands = stands
            self.unreachable_at = math.inf if stands else min(self.unreachable_at, now + self._patience)
        return False

    def reopen(self) -> None:
        """Start anew after the connection broke: what was on its way may be lost, in both directions."""
        self._close_socket(linger=0)
        self.socket = self._open()

    def close(self) -> None:
        """Close everything."""
        self._close_socket(self._linger)
        self._context.term()

    def _open(self) -> zmq.Socket[bytes]:
        socket = make_socket(self._context, self.address, zmq.DEALER, bind=False)
        self._poller.register(socket, zmq.POLLIN)
        if is_tcp(self.address):
            self.unreachable_at = time.monotonic() + self._patience
            self._num_connections += 1
            self._stands = False
            name = f"host-{self._num_connections}"
            self._watch = ConnectionWatch(self._context, name)
            ConnectionWatch.announce(socket, name)
            self._poller.register(self._watch.socket, zmq.POLLIN)
        return socket

    def _close_socket(self, linger: int) -> None:
        self._poller.unregister(self.socket)
        if self._watch is not None:
            ConnectionWatch.withdraw(self.socket)
            self._poller.unregister(self._watch.socket)
            self._watch.close()
        self.socket.close(linger=linger)
