"""The follower of one topic under which each engine core publishes snapshots and numbered batches."""

from __future__ import annotations

import time
from typing import Generic, TypeVar

import msgspec

from nbengine.kv_cache.events import KVCacheSnapshot, KVMessage
from nbengine.metrics.trace import TraceMessage, TraceSnapshot

SNAPSHOT_TIMEOUT = 1.0
"""Seconds after which a snapshot that did not come is asked for again."""

M = TypeVar("M", bound=KVMessage | TraceMessage)


class EventFollower(Generic[M]):
    """A follower that tells which messages carry on from what is known, and when to ask for a snapshot.

    A subscriber asks by subscribing once more: every new subscription brings a snapshot of each engine core,
    in its place among the batches.
    """

    def __init__(self, topic: bytes, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self.topic = topic
        self.num_losses = 0
        self.ask_at: float | None = 0.0
        """The time to ask for a snapshot, on the monotonic clock; None: no snapshot is missing."""
        self._decoder = decoder
        self._seqs: dict[int, tuple[int, int]] = {}
        """The (incarnation, seq) of the newest message of each engine core, by rank."""

    def asked(self) -> None:
        """Take note that a snapshot was asked for."""
        self.ask_at = time.monotonic() + SNAPSHOT_TIMEOUT

    def take(self, frame: bytes) -> M | None:
        """Return the message in a frame if it carries on from what is known, None otherwise.

        Raises:
            msgspec.MsgspecError: it is no message of this topic.
        """
        message = self._decoder.decode(frame)
        return message if self._is_next(message) else None

    def _is_next(self, message: M) -> bool:
        rank = message.engine_index
        number = (message.incarnation, message.seq)
        known = self._seqs.get(rank)
        if known is not None and message.incarnation > known[0]:
            # The core was started again and is empty; what was known of the one before is no loss.
            known = None
        is_snapshot = isinstance(message, KVCacheSnapshot | TraceSnapshot)
        if is_snapshot:
            self.ask_at = None
        if known is None:
            is_next = is_snapshot
            if not is_next and self.ask_at is None:
                # Another engine core's snapshot has come, this one's has not.
                self.asked()
        elif number <= known:
            # This is a snapshot that another subscriber needed, or a batch that was under way before ours.
            is_next = False
        else:
            is_next = is_snapshot or message.seq == known[1] + 1
            self.num_losses += is_snapshot or not is_next
            if not is_next:
                del self._seqs[rank]
                self.ask_at = 0.0
        if is_next:
            self._seqs[rank] = number
        return is_next
