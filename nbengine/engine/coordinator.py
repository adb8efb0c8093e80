"""The coordinator: collects the engines' statistics and publishes them to every frontend, and starts their waves.

It lives in the host process and is driven by the host's poll loop. `DPCoordinator` decides, without I/O;
`DPCoordinatorProc` owns the sockets.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Container
from typing import NamedTuple

import zmq

from nbengine.errors import WireError
from nbengine.ipc.control_messages import WantEvents
from nbengine.ipc.messages import (
    EVENT_TOPICS,
    FIRST_REQ,
    STATS_TOPIC,
    EngineCoreOutputs,
    EngineCoreRequestType,
)
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.sockets import MAX_BULK_BYTES, MAX_CONTROL_BYTES, make_socket
from nbengine.metrics.stats import EngineStats, SchedulerStats

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL = 0.1
"""Seconds between two publications while the engines are busy."""
FRONT_HWM = 1000
"""Snapshots kept for a subscriber that does not read, then dropped."""
GATHER_SECONDS = 0.01
"""How long the engines' messages gather under load before they are read."""
HIGH_LOAD = 100.0
"""Messages a second from which on they do."""
MESSAGES_A_TURN = 4096
"""Messages read from a socket before the host looks at anything else: there may always be another one."""
NOBODY = -1
"""Excluded rank of a START_DP_WAVE that is for all."""

_UNSUBSCRIBE, _SUBSCRIBE = b"\x00", b"\x01"


class WaveStart(NamedTuple):
    """What a START_DP_WAVE says: all but `exclude_rank`, which runs already, are to begin this wave."""

    wave: int
    exclude_rank: int = NOBODY


class DPCoordinator:
    """The freshest statistics of each rank, when they are due to be published, and how far the waves have come.

    A snapshot is due `PUBLISH_INTERVAL` after the previous one. It is due at once when a wave begins or ends, and when
    an engine among independent ones goes idle, so that the last thing that a frontend sees of an idle engine is that
    it is idle.

    Cores in lock step count their turns alike. A snapshot of them holds nothing of a turn that some may not have
    reported yet: it shows how things stood before the first report of the newest turn, and another one follows.

    Waves are started and ended by the engines (see `nbengine.engine.waves`). What is known here is the greatest
    (wave, running) heard of, so that no order of messages can lead it back. Every wave is announced once.
    """

    def __init__(self, num_engines: int, lock_step: bool = False) -> None:
        self.current_wave = 0
        self.running = False
        """In lock step: whether a wave runs."""
        self._lock_step = lock_step
        self._engines: list[SchedulerStats] = []
        self._incarnations: list[int] = []
        self._before: list[SchedulerStats] | None = None
        """In lock step: the engines before the first report of the newest turn, unless that was published."""
        self._newest = (0, 0)
        self._published_at = -PUBLISH_INTERVAL
        self._due: float | None = None
        self.scale(num_engines)

    @property
    def due(self) -> float | None:
        """When to publish next, on the clock of `observe`; None when nothing has changed."""
        return self._due

    # The engines.

    def scale(self, num_engines: int) -> None:
        """Have so many engines from now on; the last ones come or go."""
        del self._engines[num_engines:], self._incarnations[num_engines:]
        for rank in range(len(self._engines), num_engines):
            self._engines.append(SchedulerStats(engine_index=rank))
            self._incarnations.append(0)
        self._before = None

    def forget(self, rank: int) -> None:
        """Start anew with an engine whose process is gone; its successor has the next incarnation."""
        if rank < len(self._engines):
            self._engines[rank] = SchedulerStats(engine_index=rank)
            self._incarnations[rank] += 1
            self._before = None

    def observe(self, outputs: EngineCoreOutputs, now: float) -> WaveStart | None:
        """Take in what an engine pushed, and return what its peers have to be told.

        Statistics older than what is known are dropped.

        Raises:
            WireError: no such engine.
        """
        rank = outputs.engine_index
        self._check_rank(rank)
        if outputs.scheduler_stats is not None:
            self._observe_stats(outputs.scheduler_stats, rank, outputs.incarnation, now)
        if not self._lock_step:
            return None
        # One message may carry both, merged: the numbers say which is the later.
        if outputs.wave_complete is not None:
            self._move_to(outputs.wave_complete + 1, False, now)
        if outputs.start_wave is not None and self._move_to(outputs.start_wave, True, now):
            return WaveStart(outputs.start_wave, rank)
        return None

    def first_request(self, rank: int, wave: int, now: float) -> WaveStart | None:
        """A client has sent a request to an engine that it believes to be paused at `wave`; see `observe`.

        The engine is not left out of the announcement, and the client's idea of the wave changes nothing.

        Raises:
            WireError: no such engine, or no such wave.
        """
        self._check_rank(rank)
        if wave < 0:
            raise WireError(f"no wave has the number {wave}")
        if self._lock_step and self._move_to(self.current_wave, True, now):
            return WaveStart(self.current_wave)
        return None

    def joined(self) -> WaveStart | None:
        """An engine has subscribed: what it may have missed."""
        return WaveStart(self.current_wave) if self.running else None

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < len(self._engines):
            raise WireError(f"a message of engine {rank}, there are {len(self._engines)} engines")

    def _observe_stats(self, stats: SchedulerStats, rank: int, incarnation: int, now: float) -> None:
        known = self._engines[rank]
        progress = (stats.current_wave, stats.step_counter)
        if incarnation <= self._incarnations[rank]:
            is_stale = progress < (known.current_wave, known.step_counter)
            if is_stale or incarnation < self._incarnations[rank]:
                return
        self._incarnations[rank] = incarnation
        if self._lock_step and progress > self._newest:
            self._newest = progress
            if self._due is not None:
                self._before = self._engines.copy()
        self._engines[rank] = stats
        went_idle = not self._lock_step and _unfinished(known) and not _unfinished(stats)
        self._publish_by(now if went_idle else max(now, self._published_at + PUBLISH_INTERVAL))

    def _move_to(self, wave: int, running: bool, now: float) -> bool:
        """Tells whether that is news."""
        if (wave, running) <= (self.current_wave, self.running):
            return False
        self.current_wave, self.running = wave, running
        self._publish_by(now)
        return True

    # The frontends.

    def publish(self, now: float, wall_clock: float) -> EngineStats:
        """Return the snapshot to publish and start the next interval."""
        snapshot = self.snapshot(wall_clock)
        self._published_at = now
        self._due = None if self._before is None else now + PUBLISH_INTERVAL
        self._before = None
        return snapshot

    def snapshot(self, wall_clock: float) -> EngineStats:
        """Return the current state of all engines."""
        engines = self._engines if self._before is None else self._before
        return EngineStats(
            engines=engines.copy(),
            current_wave=self.current_wave,
            engines_running=self.running if self._lock_step else any(map(_unfinished, engines)),
            timestamp=wall_clock,
        )

    def _publish_by(self, due: float) -> None:
        self._due = due if self._due is None else min(self._due, due)


class DPCoordinatorProc:
    """The coordinator's sockets: `output_back` (PULL, from the engines), `publish_back` (XPUB, which engines in lock
    step subscribe to) and `publish_front` (XPUB, to the frontends, who may write `FIRST_REQ` to it).

    What is published to the frontends has a topic and a msgpack frame: `STATS_TOPIC`, which each new subscriber gets at
    once, and those of `EVENT_TOPICS`, which are passed on as the engines send them. These do so while there are subscribers:
    `take_wishes` has what to tell them. Who does not read loses messages, and is never waited for.

    What is published to the engines is START_DP_WAVE and a msgpack `WaveStart`. Nothing of that is ever lost: it is
    little, waits without bound, and is repeated to whoever subscribes while the wave runs.

    Under load the engines' messages are left to gather for `GATHER_SECONDS`: most of what a report costs is to be woken for
    it alone. What the first message after a quiet time says is heard at once, and so is whatever has come when a client
    says `FIRST_REQ`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        num_engines: int,
        front_publish_address: str,
        back_output_address: str,
        back_publish_address: str,
        lock_step: bool = False,
    ) -> None:
        self.state = DPCoordinator(num_engines, lock_step)
        self.publish_front = make_socket(
            context,
            front_publish_address,
            zmq.XPUB,
            bind=True,
            send_hwm=FRONT_HWM,
            max_frame_bytes=MAX_CONTROL_BYTES,
        )
        self.output_back = make_socket(
            context, back_output_address, zmq.PULL, bind=True, max_frame_bytes=MAX_BULK_BYTES
        )
        self.publish_back = make_socket(
            context, back_publish_address, zmq.XPUB, bind=True, max_frame_bytes=MAX_CONTROL_BYTES
        )
        for socket in (self.publish_front, self.publish_back):
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._decoder: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)
        self._first_decoder: MsgpackDecoder[tuple[int, int]] = MsgpackDecoder(tuple[int, int])
        self._encoder = MsgpackEncoder()
        self._topics: set[bytes] = set()
        self._wishes: list[WantEvents] = []
        self._load = _Load()
        self._gathers_until: float | None = None
        self._poller: zmq.Poller | None = None
        self._readers = {
            self.publish_front: self._read_front,
            self.output_back: self._read_back,
            self.publish_back: self._read_engine,
        }

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets that the host polls for input."""
        return list(self._readers)

    def register(self, poller: zmq.Poller) -> None:
        """Have the host's poller look at `sockets`, except while messages gather in one."""
        self._poller = poller
        for socket in self._readers:
            poller.register(socket, zmq.POLLIN)

    @property
    def deadline(self) -> float:
        """When `process` has something to do though no socket is ready; infinity if never."""
        moments = (self.state.due, self._gathers_until)
        return min((moment for moment in moments if moment is not None), default=math.inf)

    def process(self, ready: Container[object], now: float) -> None:
        """Read what the sockets in `ready` hold, and what has gathered; publish if that is due."""
        for socket in self._readers:
            if socket is self.output_back:
                if socket in ready or (self._gathers_until is not None and self._gathers_until <= now):
                    self._gather(now, self.process_input_socket(socket, now))
            elif socket in ready:
                self.process_input_socket(socket, now)
        self.publish_if_due(now)

    def _gather(self, now: float, num_read: int) -> None:
        gathered = self._gathers_until is not None
        gathers = self._load.is_high(now, num_read) and num_read > 0
        self._gathers_until = now + GATHER_SECONDS if gathers else None
        if gathers is not gathered and self._poller is not None:
            self._poller.register(self.output_back, 0 if gathers else zmq.POLLIN)

    def process_input_socket(self, socket: zmq.Socket[bytes], now: float) -> int:
        """Read what one of `sockets` holds, up to `MESSAGES_A_TURN`, and return how many messages that were. One that is
        none is dropped, and logged."""
        read = self._readers[socket]
        for count in range(MESSAGES_A_TURN):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            try:
                start = read(frames, now)
            except WireError as error:
                logger.warning("dropped a message to the coordinator: %s", error)
            else:
                if start is not None:
                    self._start_wave(start)
        return MESSAGES_A_TURN

    def publish_if_due(self, now: float) -> None:
        """Send a snapshot to the frontends if one is due."""
        if self.state.due is not None and self.state.due <= now:
            self._send(self.state.publish(now, time.time()))

    @property
    def standing_wishes(self) -> list[WantEvents]:
        """What an engine that comes has to be told: the topics that anyone is subscribed to."""
        return [WantEvents(name, True) for topic, name in EVENT_TOPICS.items() if self._is_wanted(topic)]

    def take_wishes(self) -> list[WantEvents]:
        """What the engines have to be told, in order: someone needs a snapshot and the events after it, or nobody needs
        any."""
        wishes, self._wishes = self._wishes, []
        return wishes

    def close(self) -> None:
        """Close the sockets."""
        for socket in self.sockets:
            socket.close()

    def _read_front(self, frames: list[bytes], now: float) -> WaveStart | None:
        if frames[0] == FIRST_REQ:
            rank, wave = self._first_decoder.decode(frames[1:])
            # The end of the wave that the client has seen may be there already.
            self.process_input_socket(self.output_back, now)
            return self.state.first_request(rank, wave, now)
        kind, topic = frames[0][:1], frames[0][1:]
        if len(frames) > 1 or kind not in (_SUBSCRIBE, _UNSUBSCRIBE):
            raise WireError(f"no message of a subscriber: {frames[0][:16]!r}")
        self._on_subscription(kind == _SUBSCRIBE, topic)
        return None

    def _read_engine(self, frames: list[bytes], now: float) -> WaveStart | None:  # noqa: ARG002
        return self.state.joined() if frames[0][:1] == _SUBSCRIBE else None

    def _read_back(self, frames: list[bytes], now: float) -> WaveStart | None:
        if frames[0] in EVENT_TOPICS:
            self.publish_front.send_multipart(frames)
            return None
        return self.state.observe(self._decoder.decode(frames), now)

    def _on_subscription(self, begins: bool, topic: bytes) -> None:
        # The socket tells of every new subscription, and of the end of a topic's last one.
        if begins:
            self._topics.add(topic)
            if STATS_TOPIC.startswith(topic):
                self._send(self.state.snapshot(time.time()))
        else:
            self._topics.discard(topic)
        for event_topic, name in EVENT_TOPICS.items():
            if event_topic.startswith(topic) and (begins or not self._is_wanted(event_topic)):
                self._wishes.append(WantEvents(name, begins))

    def _is_wanted(self, event_topic: bytes) -> bool:
        return any(event_topic.startswith(topic) for topic in self._topics)

    def _start_wave(self, start: WaveStart) -> None:
        frames = [EngineCoreRequestType.START_DP_WAVE.value, *self._encoder.encode(start)]
        self.publish_back.send_multipart(frames)

    def _send(self, stats: EngineStats) -> None:
        self.publish_front.send_multipart([STATS_TOPIC, *self._encoder.encode(stats)])


class _Load:
    """Whether messages come so fast that they are better read several at a time."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._count = 0
        self._is_high = False

    def is_high(self, now: float, count: int) -> bool:
        """Note that `count` messages have been read at `now`."""
        self._count += count
        if now - self._since >= PUBLISH_INTERVAL:
            self._is_high = self._count > HIGH_LOAD * (now - self._since)
            self._since, self._count = now, 0
        return self._is_high


def _unfinished(stats: SchedulerStats) -> bool:
    return stats.num_running_reqs + stats.num_waiting_reqs > 0
