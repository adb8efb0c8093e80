"""Following an engine from outside: its statistics, and what happens in its prefix cache.

It needs no lease and no client: only the engine's run directory. An engine never waits for a subscriber; one that
does not keep up loses messages, notices, and starts anew from a snapshot.
"""

from __future__ import annotations

import logging
import math
import time
from types import TracebackType
from typing import Self

import msgspec
import zmq

from nbengine.client.connection import ConnectionInfo
from nbengine.ipc.messages import KV_TOPIC, STATS_TOPIC
from nbengine.ipc.sockets import make_socket
from nbengine.kv_cache.events import KVCacheSnapshot, KVEventBatch, KVMessage
from nbengine.metrics.stats import EngineStats

logger = logging.getLogger(__name__)

RECEIVE_HWM = 1000
"""Messages kept for a caller that does not poll."""
LONG_RUN = RECEIVE_HWM // 2
"""Messages read without a pause, after which more may have been lost at the end."""
SNAPSHOT_TIMEOUT = 1.0
"""Seconds after which a snapshot that did not come is asked for again."""

StatsMessage = EngineStats | KVMessage


class StatsSubscriber:
    """Reads what the coordinator publishes. For one thread, or one event loop that watches `fileno()`.

    With `kv_events` the engine's prefix cache is followed, too: a `KVCacheSnapshot` of each engine comes first, then
    every `KVEventBatch` after it. When batches were lost (`num_losses` counts how often) another snapshot comes in
    their place.
    """

    def __init__(self, info: ConnectionInfo, *, kv_events: bool = False) -> None:
        self.num_losses = 0
        self._topics = (STATS_TOPIC, KV_TOPIC) if kv_events else (STATS_TOPIC,)
        self._run_length = 0
        self._seqs: dict[int, tuple[int, int]] = {}
        """(incarnation, seq) of the newest message of each engine core."""
        self._ask_again_at: float | None = None
        self._stats_decoder = msgspec.msgpack.Decoder(EngineStats)
        self._kv_decoder: msgspec.msgpack.Decoder[KVMessage] = msgspec.msgpack.Decoder(
            KVEventBatch | KVCacheSnapshot
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        address = info.address("stats.sock")
        self._socket = make_socket(self._context, address, zmq.SUB, bind=False, receive_hwm=RECEIVE_HWM)
        self._subscribe()

    def fileno(self) -> int:
        """Descriptor of the socket; when it becomes readable, `poll(0)` until there is nothing more."""
        return self._socket.fileno()

    def poll(self, timeout: float | None = None) -> StatsMessage | None:
        """The next message, or None if there is none within `timeout` seconds (None: however long it takes)."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            now = time.monotonic()
            if self._ask_again_at is not None and now >= self._ask_again_at:
                self._subscribe()
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
        """Wait for a message, nothing being there; non-zero if one has come."""
        if self._run_length >= LONG_RUN:
            self._subscribe()
        self._run_length = 0
        moments = [moment for moment in (end, self._ask_again_at) if moment is not None]
        return self._socket.poll(max(0, math.ceil((min(moments) - now) * 1000)) if moments else None)

    def _decode(self, frames: list[bytes]) -> StatsMessage | None:
        try:
            if frames[0] == STATS_TOPIC:
                return self._stats_decoder.decode(frames[1])
            message = self._kv_decoder.decode(frames[1])
        except (msgspec.MsgspecError, IndexError) as error:
            logger.warning("dropped a message of the coordinator: %s", error)
            return None
        return message if self._is_next(message) else None

    def _is_next(self, message: KVMessage) -> bool:
        rank = message.engine_index
        number = (message.incarnation, message.seq)
        known = self._seqs.get(rank)
        if known is not None and message.incarnation > known[0]:
            # It was started again, with an empty cache; what was known of the one before is no loss.
            known = None
        is_snapshot = isinstance(message, KVCacheSnapshot)
        if is_snapshot:
            self._ask_again_at = None
        if known is None:
            is_next = is_snapshot
            if not is_next and self._ask_again_at is None:
                # Another engine core's snapshot has come, this one's has not.
                self._ask_again_at = time.monotonic() + SNAPSHOT_TIMEOUT
        elif number <= known:
            # A snapshot that another subscriber needed, or what was under way before ours.
            is_next = False
        else:
            is_next = is_snapshot or message.seq == known[1] + 1
            self.num_losses += is_snapshot or not is_next
            if not is_next:
                del self._seqs[rank]
                self._subscribe()
        if is_next:
            self._seqs[rank] = number
        return is_next

    def _subscribe(self) -> None:
        """Every new subscription brings the newest statistics and, in its place among the batches, a snapshot."""
        for topic in self._topics:
            self._socket.unsubscribe(topic)
            self._socket.subscribe(topic)
        if KV_TOPIC in self._topics:
            self._ask_again_at = time.monotonic() + SNAPSHOT_TIMEOUT
