"""The coordinator's statistics at the client, and the client's messages to the coordinator."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
import zmq

from nbengine.ipc.messages import FIRST_REQ, STATS_TOPIC
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

RECEIVE_HWM = 16
"""Statistics that are kept while the thread of the sockets does something else;
each replaces those before it."""


class StatsFeed:
    """An XSUB on the coordinator's XPUB. It is for the thread of the sockets.

    In lock step the engine cores run or pause together, in numbered waves. A client that has sent a request
    while they pause says so (`FIRST_REQ`), and all of them start.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], info: ConnectionInfo) -> None:
        self._peer_log = PeerLog(logger)
        self.newest = EngineStats()
        address = info.address("stats.sock")
        self.socket = make_socket(context, address, zmq.XSUB, bind=False, receive_hwm=RECEIVE_HWM)
        self.socket.send(b"\x01" + STATS_TOPIC)
        self._decoder = msgspec.msgpack.Decoder(EngineStats)

    def read(self, frames: Sequence[bytes]) -> EngineStats | None:
        """Take in a message, and return the statistics in it; None if it has none."""
        try:
            if frames[0] != STATS_TOPIC:
                return None
            self.newest = self._decoder.decode(frames[1])
        except (msgspec.MsgspecError, IndexError) as error:
            self._peer_log.warn_of("coordinator", "dropped a message of the coordinator: %s", error)
            return None
        return self.newest

    def request_sent(self, rank: int, wave: int) -> None:
        """Wake the engine cores up if they pause: `rank` has a request that was sent in the wave `wave`."""
        if not self.newest.engines_running:
            # Set until the coordinator says otherwise, since one message wakes all of them.
            self.newest.engines_running = True
            self.socket.send_multipart([FIRST_REQ, msgspec.msgpack.encode((rank, wave))])

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()
