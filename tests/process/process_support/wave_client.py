"""A client of engine cores in lock step: it follows their waves, and wakes them when it believes that they pause."""

from __future__ import annotations

import msgspec
import zmq
from process_support.raw_client import RawClient

from nbengine.ipc.messages import FIRST_REQ, STATS_TOPIC
from nbengine.metrics.stats import EngineStats, SchedulerStats


class WaveClient:
    """A `RawClient` with an XSUB on the coordinator; it remembers all (wave, running) that it has read."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.front = client._socket(zmq.XSUB)
        self.front.connect(client.info.address("stats.sock"))
        self.front.send(b"\x01" + STATS_TOPIC)
        self.seen: list[tuple[int, bool]] = []
        self.stats = EngineStats()
        self._decoder = msgspec.msgpack.Decoder(EngineStats)

    def follow(self) -> None:
        """Read what the coordinator has published."""
        while self.front.poll(0):
            self._read()

    def core_stats(self, rank: int) -> SchedulerStats:
        """Ask a core for its statistics."""
        failure, stats = self.client.call("stats", rank=rank)
        assert failure is None
        return msgspec.convert(stats, SchedulerStats)

    def wait_stats(self, condition) -> EngineStats:
        """The next statistics for which the condition holds."""
        self.stats = self.client.read_stats(self.front, condition)
        return self.stats

    def request(self, request_id: str, rank: int, **params) -> None:
        """Send a request as a client does; the prompt is one token, 1."""
        self.follow()
        self.client.add(request_id, [1], rank=rank, wave=self.stats.current_wave, **params)
        if not self.stats.engines_running:
            self.first_request(rank, self.stats.current_wave)

    def first_request(self, *payload: object) -> None:
        """Tell the coordinator that the core `rank` has been sent a request while the wave `wave` was not
        begun."""
        self.front.send_multipart([FIRST_REQ, msgspec.msgpack.encode(payload)])

    def _read(self) -> None:
        topic, frame = self.front.recv_multipart()
        assert topic == STATS_TOPIC
        self.stats = self._decoder.decode(frame)
        self.seen.append((self.stats.current_wave, self.stats.engines_running))
