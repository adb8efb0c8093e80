"""A bound on the strangers that are connected to a port:
each is an open file of this process before it shows a key."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import resource
import socket
import struct
import sys
import time
from collections import deque

import zmq

from nbengine.ipc.monitor_events import receive_event
from nbengine.ipc.shortage import REPORT_INTERVAL

logger = logging.getLogger(__name__)

SHARE = 8
"""Connections without a key to one port may be one in `SHARE` of the files that the process may open."""
FEWEST = 16
"""Connections without a key that a port always takes, however few files the process may have open."""
YOUTH = 6.0
"""Seconds after which a connection that still stands has shown a key: libzmq cuts the others off before."""
EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_MONITOR_STOPPED
)
_IS_POSSIBLE = sys.platform.startswith("linux")
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27
_DROP_EVERYTHING = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A BPF program of one instruction: keep 0 bytes of the packet."""


class Strangers:
    """The number of connections to one port that have not shown a key; the caller passes the time.

    libzmq says which connections have come and gone, and how many have shown a key, but not which.
    """

    def __init__(self) -> None:
        self._young: dict[int, float] = {}
        """The times at which the connections of the last seconds came, oldest first, by descriptor."""
        self._known: deque[float] = deque()
        """The times at which connections showed a key, oldest first."""

    def came(self, descriptor: int, now: float) -> None:
        """Count a connection that was accepted."""
        self._young.pop(descriptor, None)
        self._young[descriptor] = now

    def went(self, descriptor: int) -> None:
        """Forget a connection that ended."""
        self._young.pop(descriptor, None)

    def showed_key(self, now: float) -> None:
        """Count one of the connections as no stranger."""
        self._known.append(now)

    def count(self, now: float) -> int:
        """Return the number of strangers."""
        for descriptor, came in list(self._young.items()):
            if came + YOUTH > now:
                break
            del self._young[descriptor]
        while self._known and self._known[0] + YOUTH <= now:
            self._known.popleft()
        return max(0, len(self._young) - len(self._known))


class AcceptBound:
    """A bound that keeps new connections waiting while too many strangers are connected: the kernel drops the
    packets that ask for one.

    Existing connections are not touched. A peer that was kept waiting asks again, as TCP does, and gets in
    when strangers have been cut off. The thread that binds the socket makes this object, before it binds; all
    else is for the gatekeeper's thread.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], name: str, listener: zmq.Socket[bytes]
    ) -> None:
        self.news = context.socket(zmq.PAIR)
        """Readable when `read` has something to do."""
        self.news.linger = 0
        # With a bound, libzmq's own thread would wait for a reader.
        self.news.rcvhwm = 0
        self.news.connect(f"inproc://{name}")
        listener.monitor(f"inproc://{name}", EVENTS)
        self._strangers = Strangers()
        self._port: socket.socket | None = None
        self._is_shut = False
        self._report_at = -math.inf
        self.ended = False
        """The listening socket is closed."""

    @property
    def is_shut(self) -> bool:
        """Tell whether new connections are kept waiting."""
        return self._is_shut

    def take_hold(self) -> None:
        """Take hold of the port, which the socket has just been bound to."""
        while self._port is None and self.news.poll(0):
            event = receive_event(self.news)
            if event.event == zmq.EVENT_LISTENING:
                # A copy: the original's number may belong to another file by the time it is needed.
                self._port = socket.socket(fileno=os.dup(event.value))

    def read(self, now: float) -> None:
        """Take in the news, and shut or open the port."""
        while not self.ended and self.news.poll(0):
            event = receive_event(self.news)
            match event.event:
                case zmq.EVENT_ACCEPTED:
                    self._strangers.came(event.value, now)
                case zmq.EVENT_DISCONNECTED:
                    self._strangers.went(event.value)
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._strangers.showed_key(now)
                case zmq.EVENT_MONITOR_STOPPED:
                    self.ended = True
        limit = max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // SHARE)
        self._turn(shut=self._strangers.count(now) > (limit // 2 if self._is_shut else limit))

    def close(self) -> None:
        """Let go of the port."""
        self.news.close()
        if self._port is not None:
            self._port.close()
            self._port = None

    def _turn(self, *, shut: bool) -> None:
        if shut is self._is_shut or self._port is None:
            return
        self._is_shut = shut
        if shut:
            now = time.monotonic()
            if now >= self._report_at:
                self._report_at = now + REPORT_INTERVAL
                logger.warning("too many connections without a key to a port: new ones are kept waiting")
            program = ctypes.create_string_buffer(_DROP_EVERYTHING)
            wanted = struct.pack("HP", 1, ctypes.addressof(program))
            self._port.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, wanted)
        else:
            self._port.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def accept_bound(
    context: zmq.Context[zmq.Socket[bytes]], name: str, listener: zmq.Socket[bytes]
) -> AcceptBound | None:
    """Make the bound of a socket that is about to be bound;
    None if the kernel has no filter, or no descriptor is left."""
    if not _IS_POSSIBLE:
        return None
    with contextlib.suppress(zmq.ZMQError):
        return AcceptBound(context, name, listener)
    return None
