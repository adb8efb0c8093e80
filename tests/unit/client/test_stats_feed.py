"""A client reads from the coordinator, and tells it things, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from nbengine.client.observe.stats_feed import StatsFeed
from nbengine.config import EngineConfig, ModelConfig
from nbengine.ipc.messages import FIRST_REQ, STATS_TOPIC
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.runtime.connection import ConnectionInfo

WAIT_MS = 5000


class Rig:
    """A coordinator's XPUB and a feed of it."""

    def __init__(self, directory: Path) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.publisher = self.context.socket(zmq.XPUB)
        self.publisher.bind(f"ipc://{directory}/stats.sock")
        config = EngineConfig(model=ModelConfig(model="m"))
        info = ConnectionInfo(
            name="e", run_dir=str(directory), log_path="", host_pid=0, host_started=0, config=config
        )
        self.feed = StatsFeed(self.context, info)

    def heard(self) -> list[bytes]:
        assert self.publisher.poll(WAIT_MS)
        return self.publisher.recv_multipart()

    def publish(self, *frames: bytes) -> EngineStats | None:
        self.publisher.send_multipart(frames)
        assert self.feed.socket.poll(WAIT_MS)
        return self.feed.read(self.feed.socket.recv_multipart())

    def close(self) -> None:
        self.feed.close()
        self.publisher.close(linger=0)
        self.context.term()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_statistics_are_read_and_nonsense_is_dropped(rig: Rig) -> None:
    assert rig.heard() == [b"\x01" + STATS_TOPIC]
    stats = EngineStats([SchedulerStats(1, 2, 3)], current_wave=4, engines_running=True)
    assert rig.publish(STATS_TOPIC, msgspec.msgpack.encode(stats)) == stats
    for frames in ((STATS_TOPIC,), (STATS_TOPIC, b"nonsense"), (STATS_TOPIC + b" of another kind", b"")):
        assert rig.publish(*frames) is None
    assert rig.feed.newest == stats


def test_a_request_to_pausing_cores_is_told_once(rig: Rig) -> None:
    assert rig.heard() == [b"\x01" + STATS_TOPIC]
    # Nothing is known yet: they may pause.
    for rank in (1, 0):
        rig.feed.request_sent(rank, 0)
    assert rig.heard() == [FIRST_REQ, msgspec.msgpack.encode((1, 0))]
    rig.publish(STATS_TOPIC, msgspec.msgpack.encode(EngineStats(current_wave=0, engines_running=True)))
    rig.feed.request_sent(0, 0)
    rig.publish(STATS_TOPIC, msgspec.msgpack.encode(EngineStats(current_wave=1)))
    rig.feed.request_sent(0, 1)
    assert rig.heard() == [FIRST_REQ, msgspec.msgpack.encode((0, 1))]
    assert not rig.publisher.poll(50)
