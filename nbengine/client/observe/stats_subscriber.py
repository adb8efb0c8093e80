"""The subscriber that follows an engine from outside: its statistics, its prefix cache, and its schedulers.

It needs no lease and no client: only the engine's run directory. An engine never waits for a subscriber; one
that does not keep up loses messages, notices that, and starts again from a snapshot.
"""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from nbengine.client.observe.event_follower import EventFollower
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import KV_TOPIC, STATS_TOPIC, TRACE_TOPIC
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.sockets import make_socket
from nbengine.kv_cache.events import KVCacheSnapshot, KVEventBatch, KVMessage
from nbengine.metrics.stats import EngineStats
from nbengine.metrics.trace import TraceBatch, TraceMessage, TraceSnapshot
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

RECEIVE_HWM = 1000
"""Messages that are kept for a caller that does not poll."""
LONG_RUN = RECEIVE_HWM // 2
"""Messages read without a pause, after which the last ones may have been lost:
a new subscription brings a snapshot."""

StatsMessage = EngineStats | KVMessage | TraceMessage


class StatsSubscriber:
    """A reader of what the coordinator publishes, for one thread or one event loop that watches `fileno()`.

    With `kv_events` the engine's prefix cache is followed, too: a `KVCacheSnapshot` of each engine core comes
    first, then every `KVEventBatch` after it. When batches were lost (`num_losses` counts how often) another
    snapshot comes in their place. With `trace` everything that the schedulers do is followed in the same way:
    `TraceSnapshot`s, then `TraceBatch`es.
    """

    def __init__(self, info: ConnectionInfo, *, kv_events: bool = False, trace: bool = False) -> None:
        self._followers: dict[bytes, EventFollower[Any]] = {}
        if kv_events:
            kv_decoder = msgspec.msgpack.Decoder(KVEventBatch | KVCacheSnapshot)
            self._followers[KV_TOPIC] = EventFollower(KV_TOPIC, kv_decoder)
        if trace:
            trace_decoder = msgspec.msgpack.Decoder(TraceBatch | TraceSnapshot)
            self._followers[TRACE_TOPIC] = EventFollower(TRACE_TOPIC, trace_decoder)
        self._peer_log = PeerLog(logger)
        self._run_length = 0
        self._subscribed: set[bytes] = set()
        self._stats_decoder = msgspec.msgpack.Decoder(EngineStats)
        self._context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        address = info.address("stats.sock")
        try:
            self._socket = make_socket(self._context, address, zmq.SUB, bind=False, receive_hwm=RECEIVE_HWM)
        except NBEngineError:
            self._context.term()
            raise
        self._subscribe_to_all()

    @property
    def num_losses(self) -> int:
        """Return how often batches were lost."""
        return sum(follower.num_losses for follower in self._followers.values())

    def fileno(self) -> int:
        """Return the descriptor of the socket; when it becomes readable,
        call `poll(0)` until it returns None."""
        return self._socket.fileno()

    def poll(self, timeout: float | None = None) -> StatsMessage | None:
        """Return the next message, or None if none comes within `timeout` seconds (None: no limit)."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            self._ask_for_snapshots(now)
            if self._socket.poll(0) or self._wait(now, end):
                self._run_length += 1
                message = self._decode(self._socket.recv_multipart())
                if message is not None:
                    return message
            elif end is not None and time.monotonic() >= end:
                return None

    def close(self) -> None:
        """Stop following."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait(self, now: float, end: float | None) -> int:
        """Wait for a message when none is there; return non-zero if one has come."""
        if self._run_length >= LONG_RUN:
            self._subscribe_to_all()
        self._run_length = 0
        asked = [follower.ask_at for follower in self._followers.values()]
        moments = [moment for moment in (end, *asked) if moment is not None]
        return self._socket.poll(max(0, math.ceil((min(moments) - now) * 1000)) if moments else None)

    def _decode(self, frames: list[bytes]) -> StatsMessage | None:
        try:
            if frames[0] == STATS_TOPIC:
                return self._stats_decoder.decode(frames[1])
            follower = self._followers.get(frames[0])
            message: StatsMessage | None = None if follower is None else follower.take(frames[1])
        except (msgspec.MsgspecError, IndexError) as error:
            self._peer_log.warn_of("coordinator", "dropped a message of the coordinator: %s", error)
            return None
        return message

    def _ask_for_snapshots(self, now: float) -> None:
        for follower in self._followers.values():
            if follower.ask_at is not None and now >= follower.ask_at:
                self._subscribe(follower.topic)
                follower.asked()

    def _subscribe_to_all(self) -> None:
        """Subscribe again: that brings the newest statistics and,
        in its place among the batches, a snapshot."""
        self._subscribe(STATS_TOPIC)
        for follower in self._followers.values():
            self._subscribe(follower.topic)
            follower.asked()

    def _subscribe(self, topic: bytes) -> None:
        # The new subscription comes first: between the old one's end and the new one, the engine would record
        # nothing.
        self._socket.subscribe(topic)
        if topic in self._subscribed:
            self._socket.unsubscribe(topic)
        self._subscribed.add(topic)
