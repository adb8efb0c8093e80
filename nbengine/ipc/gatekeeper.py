"""Who may connect to the sockets of this process that listen on a network: who has the engine's client key."""

from __future__ import annotations

import hmac
import logging
import math
import threading
import time

import zmq
from zmq.utils import z85

from nbengine.ipc.curve import CurveKeys

logger = logging.getLogger(__name__)

REPORT_INTERVAL = 60.0
"""Seconds between two lines in the log about refused connections, however many there are."""
_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_CURVE = b"CURVE"


class Gatekeeper(threading.Thread):
    """Answers ZeroMQ's questions about who connects (ZAP, RFC 27) in one context.

    It sleeps until somebody connects, and ends when the context is terminated.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        super().__init__(name="nbengine-gatekeeper", daemon=True)
        self._allowed = z85.decode(keys.client_public)
        self._num_refused = 0
        self._report_at = -math.inf
        # A shadow: `Context.destroy` must not close this socket, which is this thread's.
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._socket = shadow.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ADDRESS)

    def run(self) -> None:
        """Answer until the context is terminated."""
        try:
            while True:
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

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
                "refused a connection from %s, which has not the engine's key (%d so far)",
                address,
                self._num_refused,
            )
