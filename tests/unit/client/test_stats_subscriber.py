"""A subscriber asks the coordinator for what it needs; `tests/process` has what it hears of real engines."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from nbengine.client.observe import event_follower
from nbengine.client.observe.stats_subscriber import LONG_RUN, StatsSubscriber
from nbengine.ipc.messages import KV_TOPIC, TRACE_TOPIC
from nbengine.metrics.stats import SchedulerStats
from nbengine.metrics.trace import BlocksCached, TraceBatch, TraceMessage, TraceSnapshot


class Coordinator:
    """A socket that subscribers connect to within one context: what was sent is there, nothing is under way."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.socket.bind("inproc://stats")

    def subscriber(self, **topics: bool) -> StatsSubscriber:
        # Of its own it would end the context.
        context = SimpleNamespace(socket=self.context.socket, term=lambda: None)
        info = SimpleNamespace(make_context=lambda: context, address=lambda name: "inproc://stats")
        return StatsSubscriber(info, **topics)  # type: ignore[arg-type]

    def heard(self, count: int) -> list[bytes]:
        """The next messages of subscribers."""
        messages = []
        while len(messages) < count:
            assert self.socket.poll(60_000), f"only {messages}"
            messages.append(self.socket.recv())
        return messages

    def send(self, message: TraceMessage) -> None:
        self.socket.send_multipart([TRACE_TOPIC, msgspec.msgpack.encode(message)])


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Coordinator]:
    # No test takes long enough for a snapshot to be asked for again.
    monkeypatch.setattr(event_follower, "SNAPSHOT_TIMEOUT", 3600.0)
    coordinator = Coordinator()
    yield coordinator
    coordinator.context.destroy(linger=0)


def batch(seq: int) -> TraceBatch:
    return TraceBatch(0, seq, 0.0, [], SchedulerStats())


def snapshot(seq: int) -> TraceSnapshot:
    return TraceSnapshot(0, seq, 0.0, 1, 1, 1, [], BlocksCached([], []), SchedulerStats())


def test_after_a_loss_it_subscribes_once_more_without_ever_having_left(coordinator: Coordinator) -> None:
    with coordinator.subscriber(kv_events=True, trace=True) as subscriber:
        wanted = [b"\x01stats", b"\x01" + KV_TOPIC, b"\x01" + TRACE_TOPIC]
        assert coordinator.heard(3) == wanted
        for message in (snapshot(0), batch(1), batch(3)):
            coordinator.send(message)
        for expected in (snapshot(0), batch(1)):
            assert subscriber.poll(5) == expected
        assert subscriber.poll(0.05) is None
        assert subscriber.num_losses == 1
        # Nobody stops recording meanwhile: of the other topic nothing was lost.
        assert coordinator.heard(1) == [b"\x01" + TRACE_TOPIC]
        coordinator.send(snapshot(3))
        assert subscriber.poll(5) == snapshot(3)
        for seq in range(4, 4 + LONG_RUN):
            coordinator.send(batch(seq))
        while subscriber.poll(5) != batch(3 + LONG_RUN):
            pass
        assert subscriber.poll(0.01) is None
        # After a run that long the last messages may have been lost.
        assert coordinator.heard(3) == wanted
    assert sorted(coordinator.heard(3)) == [b"\x00" + topic for topic in (KV_TOPIC, b"stats", TRACE_TOPIC)]


def test_what_was_not_asked_for_and_what_is_no_message_is_dropped(
    coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with coordinator.subscriber(trace=True) as subscriber:
        coordinator.heard(2)
        for frames in ([TRACE_TOPIC], [TRACE_TOPIC, b"\x90"], [b"trace of another kind", b"\x90"]):
            coordinator.socket.send_multipart(frames)
        coordinator.send(snapshot(0))
        assert subscriber.poll(5) == snapshot(0)
    assert caplog.text.count("dropped a message of the coordinator") == 2
