"""The coordinator, which collects and publishes the engine cores' statistics, and starts their waves.

It is part of the host process and is driven by the host's poll loop. `DPCoordinator` decides, without I/O;
`DPCoordinatorProc` owns the sockets.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Container
from functools import partial
from typing import NamedTuple

import zmq

from nbengine.engine.host.history import HostHistory
from nbengine.engine.host.subscribers import SUBSCRIPTION_HWM, Subscribers, Wishes
from nbengine.errors import WireError
from nbengine.ipc.control_messages import WantEvents
from nbengine.ipc.messages import (
    EVENT_TOPICS,
    FIRST_REQ,
    STATS_TOPIC,
    EngineCoreOutputs,
    EngineCoreRequestType,
)
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.sockets import MAX_BULK_BYTES, MAX_WORD_BYTES, make_socket
from nbengine.metrics.stats import EngineStats, SchedulerStats

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL = 0.1
"""Seconds between two publications while the engine cores are busy."""
BACK_HWM = 10_000
"""Most messages of one engine core that wait to be read here; later ones wait on its side."""
FRONT_HWM = 1000
"""Most snapshots kept for a subscriber that does not read; later ones are dropped."""
GATHER_SECONDS = 0.01
"""Seconds for which the engine cores' messages gather under load before they are read."""
HIGH_LOAD = 100.0
"""Messages per second from which on they gather."""
MESSAGES_A_TURN = 4096
"""Most messages read from a socket before the host looks at anything else: there may always be another
one."""
SUBSCRIPTIONS_A_TURN = 256
"""The same limit for messages of subscribers."""
NOBODY = -1
"""The excluded rank of a START_DP_WAVE that is for all."""

_UNSUBSCRIBE, _SUBSCRIBE = b"\x00", b"\x01"


class WaveStart(NamedTuple):
    """The contents of a START_DP_WAVE: all but `exclude_rank`, which runs already, are to begin this wave."""

    wave: int
    exclude_rank: int = NOBODY


class DPCoordinator:
    """The latest statistics of each rank, the time of their next publication, and the state of the waves.

    A snapshot is due `PUBLISH_INTERVAL` after the previous one. It is due at once when a wave begins or ends,
    and when an engine core among independent ones goes idle, so that the last thing that a frontend sees of
    an idle engine core is that it is idle.

    Cores in lock step count their turns alike. A snapshot of them holds nothing of a turn that some may not
    have reported yet: it shows the state before the first report of the newest turn, and another one follows.

    The engine cores start and end waves (see `nbengine.engine.core.waves`). This class knows the greatest
    (wave, running) that it has heard of, so that no order of messages can lead it back. Every wave is
    announced once.

    `history` keeps what the reports say over time; `wall_clock` gives its rows their time of day.
    """

    def __init__(
        self, num_engines: int, lock_step: bool = False, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.history = HostHistory(wall_clock)
        self.current_wave = 0
        self.running = False
        """In lock step: True while a wave runs."""
        self._lock_step = lock_step
        self._engines: list[SchedulerStats] = []
        self._incarnations: list[int] = []
        self._before: list[SchedulerStats] | None = None
        """In lock step: the statistics before the first report of the newest turn, unless they were
        published."""
        self._newest = (0, 0)
        # The first report is published at once.
        self._published_at = -PUBLISH_INTERVAL
        self._due: float | None = None
        self.scale(num_engines)

    @property
    def due(self) -> float | None:
        """Return the time of the next publication, on the clock of `observe`; None if nothing has changed."""
        return self._due

    # The engine cores.

    def scale(self, num_engines: int) -> None:
        """Keep statistics of `num_engines` engine cores from now on; the last ones come or go."""
        del self._engines[num_engines:], self._incarnations[num_engines:]
        for rank in range(len(self._engines), num_engines):
            self._engines.append(SchedulerStats(engine_index=rank))
            self._incarnations.append(0)
        self._before = None

    def forget(self, rank: int, now: float) -> None:
        """Drop the statistics of an engine core that is gone; its successor has the next incarnation."""
        self.history.lost(rank, now)
        if rank < len(self._engines):
            self._engines[rank] = SchedulerStats(engine_index=rank)
            self._incarnations[rank] += 1
            self._before = None

    def observe(self, outputs: EngineCoreOutputs, now: float) -> WaveStart | None:
        """Take in what an engine core pushed, and return the wave that its peers have to be told, if any.

        Statistics that are older than the known ones are dropped.

        Raises:
            WireError: there is no engine core of this rank.
        """
        rank = outputs.engine_index
        self._check_rank(rank)
        if outputs.scheduler_stats is not None:
            self._observe_stats(outputs.scheduler_stats, rank, outputs.incarnation, now)
        if not self._lock_step:
            return None
        # A merged message may carry both: the numbers say which is the later.
        if outputs.wave_complete is not None:
            self._move_to(outputs.wave_complete + 1, False, now)
        if outputs.start_wave is not None and self._move_to(outputs.start_wave, True, now):
            return WaveStart(outputs.start_wave, rank)
        return None

    def first_request(self, rank: int, wave: int, now: float) -> WaveStart | None:
        """Note that a client has sent a request to an engine core that it believes to be paused at `wave`.

        Return the wave to announce, as `observe` does. The announcement includes that engine core, and the
        client's idea of the wave changes nothing.

        Raises:
            WireError: there is no engine core of this rank, or no such wave.
        """
        self._check_rank(rank)
        if wave < 0:
            raise WireError(f"no wave has the number {wave}")
        if self._lock_step and self._move_to(self.current_wave, True, now):
            return WaveStart(self.current_wave)
        return None

    def joined(self) -> WaveStart | None:
        """Return the announcement that an engine core which has just subscribed may have missed."""
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
            if stats.requests is None:
                stats.requests = known.requests
        else:
            self.history.lost(rank, now)
        self._incarnations[rank] = incarnation
        self.history.observe(rank, stats, now)
        if self._lock_step and progress > self._newest:
            self._newest = progress
            if self._due is not None:
                self._before = self._engines.copy()
        self._engines[rank] = stats
        went_idle = not self._lock_step and _unfinished(known) and not _unfinished(stats)
        self._publish_by(now if went_idle else max(now, self._published_at + PUBLISH_INTERVAL))

    def _move_to(self, wave: int, running: bool, now: float) -> bool:
        """Move to a state of the waves, and return whether that is news."""
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
        """Return the current state of all engine cores. Safe on any thread: reports are replaced as a whole."""
        before = self._before
        engines = self._engines if before is None else before
        return EngineStats(
            engines=engines.copy(),
            current_wave=self.current_wave,
            engines_running=self.running if self._lock_step else any(map(_unfinished, engines)),
            timestamp=wall_clock,
        )

    def _publish_by(self, due: float) -> None:
        self._due = due if self._due is None else min(self._due, due)


class DPCoordinatorProc:
    """The coordinator's sockets.

    They are `output_back` (PULL, from the engine cores), `publish_back` (XPUB, to which engine cores in lock
    step subscribe) and `publish_front` (XPUB, to the frontends, which may write `FIRST_REQ` to it).

    A publication to the frontends has a topic and a msgpack frame. The topics are `STATS_TOPIC`, of which
    each new subscriber gets a message at once, and those of `EVENT_TOPICS`, which are passed on as the engine
    cores send them. The engine cores send events only while there are subscribers: `take_wishes` returns what
    to tell them. A subscriber that does not read loses messages, and is never waited for.

    A publication to the engine cores is START_DP_WAVE and a msgpack `WaveStart`. It is never lost: it is
    small, waits without bound, and is repeated to engine cores that subscribe while the wave runs.

    Under load the engine cores' messages gather for `GATHER_SECONDS`, because most of a report's cost is to
    be woken for it alone. The first message after a quiet time is read at once, and so are all that have come
    when a client says `FIRST_REQ`.
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
            receive_hwm=SUBSCRIPTION_HWM,
            max_frame_bytes=MAX_WORD_BYTES,
        )
        self.output_back = make_socket(
            context,
            back_output_address,
            zmq.PULL,
            bind=True,
            receive_hwm=BACK_HWM,
            max_frame_bytes=MAX_BULK_BYTES,
        )
        self.publish_back = make_socket(
            context,
            back_publish_address,
            zmq.XPUB,
            bind=True,
            receive_hwm=SUBSCRIPTION_HWM,
            max_frame_bytes=MAX_WORD_BYTES,
        )
        for socket in (self.publish_front, self.publish_back):
            # Else only a topic's first subscriber would be told of, and later ones would not be welcomed.
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._decoder: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)
        self._first_decoder: MsgpackDecoder[tuple[int, int]] = MsgpackDecoder(tuple[int, int])
        self._encoder = MsgpackEncoder()
        self._topics: set[bytes] = set()
        self._wishes = Wishes()
        self._newcomers: set[zmq.Socket[bytes]] = set()
        """Sockets with new subscribers, which have to be told the present state."""
        self._load = _Load()
        self._gathers_until: float | None = None
        self._poller: zmq.Poller | None = None
        self._peer_log = PeerLog(logger)
        front = Subscribers(self.publish_front, (STATS_TOPIC, *EVENT_TOPICS), self._peer_log)
        wave_topics = (EngineCoreRequestType.START_DP_WAVE.value,)
        back = Subscribers(self.publish_back, wave_topics, self._peer_log)
        self._receivers: dict[zmq.Socket[bytes], Callable[[], list[bytes]]] = {
            self.publish_front: front.receive,
            self.output_back: partial(self.output_back.recv_multipart, zmq.NOBLOCK),
            self.publish_back: back.receive,
        }
        self._readers = {
            self.publish_front: self._read_front,
            self.output_back: self._read_back,
            self.publish_back: self._read_engine,
        }

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Return the sockets that the host polls for input."""
        return list(self._readers)

    def register(self, poller: zmq.Poller) -> None:
        """Have the host's poller watch `sockets`, except while messages gather in one."""
        self._poller = poller
        for socket in self._readers:
            poller.register(socket, zmq.POLLIN)

    @property
    def deadline(self) -> float:
        """Return when `process` has something to do though no socket is ready; infinity if never."""
        due, gathers_until, wishes = self.state.due, self._gathers_until, self._wishes.deadline
        published = math.inf if due is None else due
        return min(published, wishes) if gathers_until is None else min(published, wishes, gathers_until)

    def process(self, ready: Container[object], now: float) -> None:
        """Read the sockets that are `ready`, and the messages that have gathered; publish if that is due."""
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
            # A socket with messages would end every poll at once, so it is not watched while they gather.
            self._poller.register(self.output_back, 0 if gathers else zmq.POLLIN)

    def process_input_socket(self, socket: zmq.Socket[bytes], now: float) -> int:
        """Read the messages in one of `sockets`, and return how many there were.

        At most `MESSAGES_A_TURN` are read, or `SUBSCRIPTIONS_A_TURN`. One that cannot be understood is
        dropped and logged.
        """
        read, receive = self._readers[socket], self._receivers[socket]
        most = MESSAGES_A_TURN if socket is self.output_back else SUBSCRIPTIONS_A_TURN
        count = 0
        for count in range(1, most + 1):
            try:
                start = read(receive(), now)
            except zmq.Again:
                count -= 1
                break
            except WireError as error:
                self._peer_log.warn_of(socket, "dropped a message to the coordinator: %s", error)
            else:
                if start is not None:
                    self._start_wave(start)
        self._welcome_newcomers()
        return count

    def _welcome_newcomers(self) -> None:
        """Tell the new subscribers the present state, with one message however many there are."""
        if self.publish_front in self._newcomers:
            self._send(self.state.snapshot(time.time()))
        start = self.state.joined() if self.publish_back in self._newcomers else None
        self._newcomers.clear()
        if start is not None:
            self._start_wave(start)

    def publish_if_due(self, now: float) -> None:
        """Send a snapshot to the frontends if one is due."""
        if self.state.due is not None and self.state.due <= now:
            self._send(self.state.publish(now, time.time()))

    @property
    def standing_wishes(self) -> list[WantEvents]:
        """Return the wishes for a new engine core: the topics to which anyone is subscribed."""
        return [WantEvents(name, True) for topic, name in EVENT_TOPICS.items() if self._is_wanted(topic)]

    def take_wishes(self, now: float) -> list[WantEvents]:
        """Return the wishes that the engine cores have to be told: someone needs a snapshot and the events
        after it, or nobody needs any."""
        return self._wishes.take(now)

    def close(self) -> None:
        """Close the sockets."""
        for socket in self.sockets:
            socket.close()

    def _read_front(self, frames: list[bytes], now: float) -> WaveStart | None:
        if frames[0] == FIRST_REQ:
            rank, wave = self._first_decoder.decode(frames[1:])
            # The message that ends the wave which the client has seen may be there already.
            self.process_input_socket(self.output_back, now)
            return self.state.first_request(rank, wave, now)
        if len(frames) > 1 or frames[0][:1] not in (_UNSUBSCRIBE, _SUBSCRIBE):
            raise WireError(f"no message of a subscriber: {frames[0][:16]!r}")
        self._on_subscription(frames[0][:1] == _SUBSCRIBE, frames[0][1:])
        return None

    def _read_engine(self, frames: list[bytes], now: float) -> WaveStart | None:  # noqa: ARG002
        if frames[0][:1] == _SUBSCRIBE:
            self._newcomers.add(self.publish_back)
        return None

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
                self._newcomers.add(self.publish_front)
        else:
            self._topics.discard(topic)
        for event_topic, name in EVENT_TOPICS.items():
            if event_topic.startswith(topic) and (begins or not self._is_wanted(event_topic)):
                self._wishes.note(name, begins)

    def _is_wanted(self, event_topic: bytes) -> bool:
        return any(event_topic.startswith(topic) for topic in self._topics)

    def _start_wave(self, start: WaveStart) -> None:
        frames = [EngineCoreRequestType.START_DP_WAVE.value, *self._encoder.encode(start)]
        self.publish_back.send_multipart(frames)

    def _send(self, stats: EngineStats) -> None:
        self.publish_front.send_multipart([STATS_TOPIC, *self._encoder.encode(stats)])


class _Load:
    """A meter that tells whether messages come so fast that they are better read several at a time."""

    def __init__(self) -> None:
        self._since = -math.inf
        self._count = 0
        self._is_high = False

    def is_high(self, now: float, count: int) -> bool:
        """Note that `count` messages have been read at `now`, and return whether the load is high."""
        self._count += count
        if now - self._since >= PUBLISH_INTERVAL:
            self._is_high = self._count > HIGH_LOAD * (now - self._since)
            self._since, self._count = now, 0
        return self._is_high


def _unfinished(stats: SchedulerStats) -> bool:
    return stats.num_running_reqs + stats.num_waiting_reqs > 0
