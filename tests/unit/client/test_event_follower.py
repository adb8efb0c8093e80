"""A follower takes the messages that carry on from what it knows, and asks for another snapshot after a
gap."""

from __future__ import annotations

import time

import msgspec
import pytest

from nbengine.client.observe.event_follower import SNAPSHOT_TIMEOUT, EventFollower
from nbengine.ipc.messages import TRACE_TOPIC
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import BlocksCached, TraceBatch, TraceMessage, TraceSnapshot


class Follower:
    """Tells of each message whether it was handed on."""

    def __init__(self) -> None:
        decoder = msgspec.msgpack.Decoder(TraceBatch | TraceSnapshot)
        self.follower: EventFollower[TraceMessage] = EventFollower(TRACE_TOPIC, decoder)
        assert self.wants_to_ask
        self.follower.asked()

    @property
    def wants_to_ask(self) -> bool:
        return self.follower.ask_at is not None and self.follower.ask_at <= time.monotonic()

    def batch(self, seq: int, rank: int = 0, incarnation: int = 0) -> bool:
        return self._take(TraceBatch(rank, seq, 0.0, [], SchedulerStats(), incarnation))

    def snapshot(self, seq: int, rank: int = 0, incarnation: int = 0) -> bool:
        cached = BlocksCached([], [])
        return self._take(TraceSnapshot(rank, seq, 0.0, 1, 1, 1, [], cached, SchedulerStats(), incarnation))

    def _take(self, message: TraceMessage) -> bool:
        taken = self.follower.take(msgspec.msgpack.encode(message))
        assert taken in (message, None)
        return taken is not None


def test_a_snapshot_comes_first_and_every_batch_after_it() -> None:
    follower = Follower()
    assert not follower.batch(4)
    assert follower.snapshot(4)
    assert follower.follower.ask_at is None
    assert not follower.batch(4)
    assert follower.batch(5)
    # Somebody else has asked for it.
    assert not follower.snapshot(5)
    assert follower.batch(6)
    assert follower.follower.num_losses == 0


def test_a_gap_is_a_loss_and_a_snapshot_is_asked_for_at_once() -> None:
    follower = Follower()
    assert follower.snapshot(0)
    assert not follower.batch(2)
    assert follower.follower.num_losses == 1
    assert follower.wants_to_ask
    follower.follower.asked()
    assert not follower.wants_to_ask
    assert not follower.batch(3)
    assert follower.snapshot(3)
    assert follower.batch(4)
    assert follower.follower.num_losses == 1


def test_a_snapshot_that_is_ahead_stands_for_a_loss() -> None:
    follower = Follower()
    assert follower.snapshot(0)
    assert follower.snapshot(5)
    assert follower.follower.num_losses == 1
    assert follower.batch(6)


def test_each_engine_core_is_followed_by_itself() -> None:
    follower = Follower()
    assert follower.snapshot(7)
    assert not follower.batch(3, rank=1)
    ask_at = follower.follower.ask_at
    assert ask_at is not None
    assert 0 < ask_at - time.monotonic() <= SNAPSHOT_TIMEOUT
    assert follower.batch(8)
    assert follower.snapshot(3, rank=1)
    assert follower.batch(4, rank=1)
    assert follower.follower.num_losses == 0


def test_one_that_was_started_again_is_no_loss_and_its_predecessor_is_heard_no_more() -> None:
    follower = Follower()
    assert follower.snapshot(7)
    assert not follower.batch(1, incarnation=1)
    assert follower.snapshot(1, incarnation=1)
    assert not follower.batch(8)
    assert follower.batch(2, incarnation=1)
    assert follower.follower.num_losses == 0


def test_what_is_no_message_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        Follower().follower.take(b"\x90")
