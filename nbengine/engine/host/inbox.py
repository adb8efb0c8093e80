"""The inbox of the host's control messages, in which no peer can hold up the others with a flood."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import zmq

from nbengine.ipc.peer_log import PeerLog

MESSAGES_A_TURN = 256
"""Most messages read from a socket before the host looks at anything else. ZeroMQ gives those of all peers in
turn."""
MESSAGES_A_SECOND = 200
"""Most messages of one client that are read in a second; a client has reason to send one every few
seconds."""


class RateLimit:
    """A limit on the messages that each peer sends in a second."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._until = -math.inf
        self._counts: Counter[bytes] = Counter()

    def allows(self, identity: bytes, now: float) -> bool:
        """Note a message, and return whether its peer is still within the limit of this second."""
        if self._most == math.inf:
            return True
        if now >= self._until:
            self._until = now + 1.0
            self._counts.clear()
        count = self._counts[identity] = self._counts[identity] + 1
        return count <= self._most


class Inbox:
    """A reader of a ROUTER. Messages of a peer beyond `most_a_second` are dropped unread."""

    def __init__(
        self, socket: zmq.Socket[bytes], log: PeerLog, most_a_second: float = MESSAGES_A_SECOND
    ) -> None:
        self._socket = socket
        self._log = log
        self._limit = RateLimit(most_a_second)
        self._most = most_a_second

    def read(self, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """Yield each waiting message's sender identity and frames, `MESSAGES_A_TURN` messages at most."""
        for _ in range(MESSAGES_A_TURN):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if self._limit.allows(identity, now):
                yield identity, frames
            else:
                message = "dropped a message from %s, which sends more than %g a second"
                self._log.warn_of(identity, message, identity, self._most)
