"""The coordinator: collects the engines' statistics and publishes them to every frontend.

It lives in the host process and is driven by the host's poll loop. `CoordinatorState` decides, without I/O;
`DPCoordinatorProc` owns the sockets.
"""

from __future__ import annotations

import logging
import time

import zmq

from nbengine.errors import WireError
from nbengine.ipc.messages import KV_TOPIC, STATS_TOPIC, EngineCoreOutputs
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.sockets import make_socket
from nbengine.metrics.stats import EngineStats, SchedulerStats

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL = 0.1
"""Seconds between two publications while the engines are busy."""
FRONT_HWM = 1000
"""Snapshots kept for a subscriber that does not read, then dropped."""

_SUBSCRIBE = b"\x01"


class CoordinatorState:
    """The freshest statistics of each rank, and when they are due to be published.

    A snapshot is due `PUBLISH_INTERVAL` after the previous one, and at once when an engine goes idle, so that
    the last thing that a frontend sees of an idle engine is that it is idle.
    """

    def __init__(self, num_engines: int) -> None:
        self._engines = [SchedulerStats(engine_index=rank) for rank in range(num_engines)]
        self._current_wave = 0
        self._published_at = -PUBLISH_INTERVAL
        self._due: float | None = None

    @property
    def due(self) -> float | None:
        """When to publish next, on the clock of `observe`; None when nothing has changed."""
        return self._due

    def observe(self, outputs: EngineCoreOutputs, now: float) -> None:
        """Take in what an engine pushed; statistics older than what is known are dropped.

        Raises:
            WireError: no such engine.
        """
        stats = outputs.scheduler_stats
        if stats is None:
            return
        rank = outputs.engine_index
        if not 0 <= rank < len(self._engines):
            raise WireError(f"statistics of engine {rank}, there are {len(self._engines)} engines")
        known = self._engines[rank]
        if (stats.current_wave, stats.step_counter) < (known.current_wave, known.step_counter):
            return
        self._engines[rank] = stats
        self._current_wave = max(self._current_wave, stats.current_wave)
        went_idle = _unfinished(known) and not _unfinished(stats)
        due = now if went_idle else max(now, self._published_at + PUBLISH_INTERVAL)
        self._due = due if self._due is None else min(self._due, due)

    def publish(self, now: float, wall_clock: float) -> EngineStats:
        """Return the snapshot to publish and start the next interval."""
        self._published_at, self._due = now, None
        return self.snapshot(wall_clock)

    def forget(self, rank: int) -> None:
        """Start anew with an engine whose process is gone: its successor counts its steps from the beginning."""
        if rank < len(self._engines):
            self._engines[rank] = SchedulerStats(engine_index=rank)

    def scale(self, num_engines: int) -> None:
        """Have so many engines from now on; the last ones come or go."""
        del self._engines[num_engines:]
        for rank in range(len(self._engines), num_engines):
            self._engines.append(SchedulerStats(engine_index=rank))

    def snapshot(self, wall_clock: float) -> EngineStats:
        """Return the current state of all engines."""
        return EngineStats(
            engines=list(self._engines),
            current_wave=self._current_wave,
            engines_running=any(map(_unfinished, self._engines)),
            timestamp=wall_clock,
        )


class DPCoordinatorProc:
    """The coordinator's sockets: `output_back` (PULL, from the engines), `publish_back` (XPUB, which
    data-parallel engines subscribe to) and `publish_front` (XPUB, to the frontends).

    What is published has a topic and a msgpack frame: `STATS_TOPIC`, which each new subscriber gets at once, and
    `KV_TOPIC`, which is passed on as the engines send it. These do so while there are subscribers:
    `take_kv_wishes` has what to tell them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        num_engines: int,
        front_publish_address: str,
        back_output_address: str,
        back_publish_address: str,
    ) -> None:
        self.state = CoordinatorState(num_engines)
        self.publish_front = make_socket(
            context, front_publish_address, zmq.XPUB, bind=True, send_hwm=FRONT_HWM
        )
        self.publish_front.setsockopt(zmq.XPUB_VERBOSE, 1)
        self.output_back = make_socket(context, back_output_address, zmq.PULL, bind=True)
        self.publish_back = make_socket(context, back_publish_address, zmq.XPUB, bind=True)
        self._decoder: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)
        self._encoder = MsgpackEncoder()
        self._topics: set[bytes] = set()
        self._kv_wishes: list[bool] = []

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets that the host polls for input."""
        return [self.publish_front, self.output_back, self.publish_back]

    def process_input_socket(self, socket: zmq.Socket[bytes], now: float) -> None:
        """Read everything that one of `sockets` holds."""
        while socket.poll(0):
            frames = socket.recv_multipart()
            if socket is self.output_back:
                self._observe(frames, now)
            elif socket is self.publish_front:
                self._on_subscription(frames[0][:1] == _SUBSCRIBE, frames[0][1:])

    def publish_if_due(self, now: float) -> None:
        """Send a snapshot to the frontends if one is due."""
        if self.state.due is not None and self.state.due <= now:
            self._send(self.state.publish(now, time.time()))

    @property
    def wants_kv_events(self) -> bool:
        """Whether anyone is subscribed to the engines' KV events."""
        return any(KV_TOPIC.startswith(topic) for topic in self._topics)

    def take_kv_wishes(self) -> list[bool]:
        """What has changed, in order: someone needs a snapshot and the events after it, or nobody needs any."""
        wishes, self._kv_wishes = self._kv_wishes, []
        return wishes

    def close(self) -> None:
        """Close the sockets."""
        for socket in self.sockets:
            socket.close()

    def _on_subscription(self, begins: bool, topic: bytes) -> None:
        # The socket tells of every new subscription, and of the end of a topic's last one.
        if begins:
            self._topics.add(topic)
            if STATS_TOPIC.startswith(topic):
                self._send(self.state.snapshot(time.time()))
        else:
            self._topics.discard(topic)
        if KV_TOPIC.startswith(topic) and (begins or not self.wants_kv_events):
            self._kv_wishes.append(begins)

    def _observe(self, frames: list[bytes], now: float) -> None:
        if frames[0] == KV_TOPIC:
            self.publish_front.send_multipart(frames)
            return
        try:
            self.state.observe(self._decoder.decode(frames), now)
        except WireError as error:
            logger.warning("dropped a message to the coordinator: %s", error)

    def _send(self, stats: EngineStats) -> None:
        self.publish_front.send_multipart([STATS_TOPIC, *self._encoder.encode(stats)])


def _unfinished(stats: SchedulerStats) -> bool:
    return stats.num_running_reqs + stats.num_waiting_reqs > 0
