"""What a subscriber knows of one topic under which each engine core publishes snapshots and numbered batches."""

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
    """Tells which messages of a topic carry on from what is known, and when a snapshot has to be asked for.

    To ask is to subscribe once more; every new subscription brings a snapshot of each engine core, in its place among the
    batches.
    """

    def __init__(self, topic: bytes, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self.topic = topic
        self.num_losses = 0
        self.ask_at: float | None = 0.0
        """When a snapshot has to be asked for, on the monotonic clock; None: none is missing."""
        self._decoder = decoder
        self._seqs: dict[int, tuple[int, int]] = {}
        """(incarnation, seq) of the newest message of each engine core."""

    def asked(self) -> None:
        """A snapshot is on its way."""
        self.ask_at = time.monotonic() + SNAPSHOT_TIMEOUT

    def take(self, frame: bytes) -> M | None:
        """The message in a frame, if it carries on from what is known.

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
            # It was started again, with nothing; what was known of the one before is no loss.
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
            # A snapshot that another subscriber needed, or what was under way before ours.
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
