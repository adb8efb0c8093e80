"""The gatekeeper of sockets that listen on a network: only peers with the engine's client key may connect."""

from __future__ import annotations

import hmac
import itertools
import logging
import math
import threading
import time
from collections import deque

import zmq
from zmq.utils import z85

from nbengine.ipc.accept_bound import AcceptBound, accept_bound
from nbengine.ipc.curve import CurveKeys

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 60.0
"""Seconds between two lines in the log about refused connections, however many are refused."""
LOOK_MS = 250
"""Milliseconds between two looks at a port that is shut."""
_ADDRESS = "inproc://zeromq.zap.01"
_WAKE_ADDRESS = "inproc://gatekeeper"
_VERSION = b"1.0"
_CURVE = b"CURVE"


class Gatekeeper(threading.Thread):
    """A thread that answers ZeroMQ's questions about peers (ZAP, RFC 27) in one context,
    and bounds strangers.

    It sleeps until somebody connects, and ends when the context is terminated.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        super().__init__(name="nbengine-gatekeeper", daemon=True)
        self._allowed = z85.decode(keys.client_public)
        self._num_refused = 0
        self._report_at = -math.inf
        # A shadow context: `Context.destroy` must not close this socket, which belongs to this thread.
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._shadow = shadow
        self._socket = shadow.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)
        self._wake = shadow.socket(zmq.PULL)
        self._wake.linger = 0
        self._wake.bind(_WAKE_ADDRESS)
        self._poller = zmq.Poller()
        for socket in (self._socket, self._wake):
            self._poller.register(socket, zmq.POLLIN)
        self._new_bounds: deque[AcceptBound] = deque()
        self._bounds: list[AcceptBound] = []
        self._numbers = itertools.count()

    def bind(self, listener: zmq.Socket[bytes], address: str) -> None:
        """Bind a socket to a port, where strangers cannot use up this process's descriptors.

        This is safe on any thread.
        """
        bound = accept_bound(self._shadow, f"accepts-{next(self._numbers)}", listener)
        if bound is None:
            listener.bind(address)
            return
        try:
            listener.bind(address)
            bound.take_hold()
        finally:
            self._new_bounds.append(bound)
            with self._shadow.socket(zmq.PUSH) as waker:
                waker.connect(_WAKE_ADDRESS)
                waker.send(b"")

    def run(self) -> None:
        """Answer until the context is terminated."""
        try:
            while True:
                self._turn()
        except zmq.ContextTerminated:
            pass
        finally:
            for bound in (*self._bounds, *self._new_bounds):
                bound.close()
            for socket in (self._socket, self._wake):
                socket.close()

    def _turn(self) -> None:
        # A port that is shut may open because time has passed, so it is looked at without news, too.
        patience = LOOK_MS if any(bound.is_shut for bound in self._bounds) else None
        ready = dict(self._poller.poll(patience))
        if self._socket in ready:
            self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        if self._wake in ready:
            self._wake.recv()
        while self._new_bounds:
            bound = self._new_bounds.popleft()
            self._bounds.append(bound)
            self._poller.register(bound.news, zmq.POLLIN)
        for bound in list(self._bounds):
            if bound.is_shut or bound.news.poll(0):
                bound.read(time.monotonic())
            if bound.ended:
                self._bounds.remove(bound)
                self._poller.unregister(bound.news)
                bound.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        _, request_id, _, address, _, mechanism, *credentials = request
        if (
            mechanism == _CURVE
            and len(credentials) == 1
            and hmac.compare_digest(credentials[0], self._allowed)
        ):
            return [_VERSION, request_id, b"200", b"", b"", b""]
        self._note_refusal(address.decode(errors="replace"))
        return [_VERSION, request_id, b"400", b"not a key of this engine", b"", b""]

    def _note_refusal(self, address: str) -> None:
        self._num_refused += 1
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_INTERVAL
            logger.warning(
                "refused a connection from %s, which does not have the engine's key (%d so far)",
                address,
                self._num_refused,
            )
