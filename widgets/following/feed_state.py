"""What is known of an engine that is followed: messages in, a `DashboardState` out. No I/O but the connection file's."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from nbengine.client.connection import ConnectionInfo, newest
from nbengine.client.trace_mirror import TraceMirror
from nbengine.config import ParallelConfig
from nbengine.errors import WireError
from nbengine.ipc.control_messages import EngineReady
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.metrics.trace import TraceBatch, TraceMessage, TraceSnapshot
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel, Rates
from nbengine.widgets.following.ownership import WAITING, Owner, own_requests
from nbengine.widgets.following.rates import RateMeter
from nbengine.widgets.waves.timeline import WaveRecorder

logger = logging.getLogger(__name__)

TRACE_LAG = 0.5
"""Seconds by which a mirror may be older than the published statistics and still be what is shown: an engine core that
makes steps sends its trace oftener."""
WAVE_SPANS = 1_200
"""Time between two snapshots of the statistics that are kept: two minutes of a busy engine."""
LOSS_SECONDS = 30.0
"""For how long it is said that something was lost."""


class FeedState:
    """For one thread at a time."""

    def __init__(self, info: ConnectionInfo) -> None:
        self._info = info
        self._label = label_of(info)
        self._labelled: object = None
        self._stats = EngineStats()
        self._mirrors: dict[int, TraceMirror] = {}
        self._heard: set[int] = set()
        """Ranks whose mirrors go on from a snapshot of this subscription."""
        self.has_stats = False
        """Whether anything has been heard of the engine cores since the subscription began."""
        self._meter = RateMeter()
        self._recorder = WaveRecorder(info.name, info.config.lock_step, keep=WAVE_SPANS)
        self._owners: list[Owner] = []
        self._clock_lead = 0.0
        self._num_losses = 0
        self._lost_at = -LOSS_SECONDS
        self._has_news = True
        self._rates = Rates()
        self._ended_because: str | None = None
        self.is_disconnected = False
        """Whether only another subscription goes on from where the mirrors are."""

    @property
    def ended(self) -> bool:
        """Whether the engine has ended."""
        return self._ended_because is not None

    @property
    def changed(self) -> bool:
        """Whether a state would differ from the last one: something has come, or a rate is still going down."""
        rates = self._rates
        moves = (rates.tokens_in_per_second, rates.tokens_out_per_second, rates.inter_token_latency)
        return self._has_news or any(moves)

    @property
    def is_known(self) -> bool:
        """Whether every engine core has said how it is since the subscription began."""
        return self.has_stats and all(engine.engine_index in self._heard for engine in self._stats.engines)

    def begin_subscription(self) -> None:
        """From here on the engine is heard again: what is known is how things stood before."""
        self.is_disconnected = self.has_stats = False
        self._heard.clear()
        self._recorder.break_off()

    def add_owner(self, owner: Owner) -> None:
        """A client of this process that has the engine."""
        if not any(owner.same_as(known) for known in self._owners):
            self._owners.append(owner)

    @property
    def owners(self) -> Sequence[Owner]:
        """The clients of this process."""
        return self._owners

    def take(self, message: object) -> None:
        """Take in what the engine has published."""
        if isinstance(message, EngineStats):
            self._take_stats(message)
        elif isinstance(message, TraceBatch | TraceSnapshot):
            rank = message.engine_index
            mirror = self._mirrors.get(rank)
            if mirror is None:
                mirror = self._mirrors[rank] = TraceMirror(rank)
            self._apply(mirror, message)
        else:
            return
        self._has_news = True

    def note_losses(self, num_losses: int) -> None:
        """How many times the subscriber has lost something, as far as it knows."""
        if num_losses > self._num_losses:
            self._lost_at = time.monotonic()
        self._num_losses = num_losses

    def cause_of_death(self) -> str | None:
        """Why the engine has ended, if a client of this process knows."""
        causes = (owner.cause_of_death() for owner in self._owners)
        return next((cause for cause in causes if cause is not None), None)

    def end(self, reason: str) -> None:
        """The engine has ended."""
        self._ended_because = reason
        self._has_news = True

    def build(self, now: float) -> DashboardState:
        """How things stand at `now`, a `time.time()` here."""
        stats = merged(self._stats, self._mirrors)
        moment = max([self._stats.timestamp, *(mirror.time for mirror in self._mirrors.values())])
        self._relabel()
        if not self.ended:
            self._meter.take(self._mirrors)
            self._rates = self._meter.rates(stats, max(moment, now - self._clock_lead))
        self._has_news = False
        requests = [view.added for mirror in self._mirrors.values() for view in mirror.requests.values()]
        return DashboardState(
            label=self._label,
            state="ended" if self.ended else state_word(self._info, stats),
            time=moment,
            stats=stats,
            rates=Rates(memory_bytes=self._rates.memory_bytes) if self.ended else self._rates,
            mirrors=self._mirrors,
            waves=self._recorder.timeline(None if self.ended else moment),
            own_requests={} if self.ended else own_requests(self._owners, requests, WAITING.requests()),
            note=self._note(),
        )

    def _apply(self, mirror: TraceMirror, message: TraceMessage) -> None:
        try:
            is_next = mirror.apply(message)
        except (WireError, LookupError, ValueError) as error:
            logger.warning("what engine %s has published makes no sense: %r", self._info.name, error)
            is_next = False
        if is_next:
            self._heard.add(mirror.engine_index)
        else:
            self._heard.discard(mirror.engine_index)
            self._mirrors[mirror.engine_index] = TraceMirror(mirror.engine_index)
            self.is_disconnected = True

    def _take_stats(self, stats: EngineStats) -> None:
        self._clock_lead = 0.0 if self._info.is_here else time.time() - stats.timestamp
        self._stats = stats
        self.has_stats = bool(stats.engines)
        self._recorder.take(stats)
        for rank in self._mirrors.keys() - {engine.engine_index for engine in stats.engines}:
            del self._mirrors[rank]
            self._heard.discard(rank)

    def _relabel(self) -> None:
        """Look again what the engine says of itself when its engine cores are others."""
        cores = {
            engine.engine_index: self._incarnation(engine.engine_index) for engine in self._stats.engines
        }
        if cores != self._labelled and not self.ended:
            self._labelled = cores
            self._label = label_of(newest(self._info))

    def _incarnation(self, rank: int) -> int:
        mirror = self._mirrors.get(rank)
        return 0 if mirror is None else mirror.incarnation

    def _note(self) -> str:
        if self._ended_because is not None:
            return self._ended_because
        if time.monotonic() - self._lost_at < LOSS_SECONDS:
            return "this notebook did not keep up, and some steps are missing"
        return ""


def label_of(info: ConnectionInfo) -> EngineLabel:
    """What an engine says of itself."""
    first: EngineReady | None = info.ready[0] if info.ready else None
    return EngineLabel(
        name=info.name,
        model=info.config.model.model,
        topology=topology(info.config.parallel),
        device="" if first is None else first.device,
        dtype="" if first is None else first.dtype,
        lock_step=info.config.lock_step,
    )


def topology(parallel: ParallelConfig) -> str:
    """As in `TP 2 × PP 2`; `1 engine core` where nothing is divided."""
    sizes = {
        "DP": parallel.data_parallel_size,
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
    }
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 engine core"


def state_word(info: ConnectionInfo, stats: EngineStats) -> str:
    """ "starting", "asleep", "paused", "running" or "idle"."""
    if not stats.engines:
        return "idle" if info.ready else "starting"
    if any(engine.is_sleeping for engine in stats.engines):
        return "asleep"
    if any(engine.is_paused for engine in stats.engines):
        return "paused"
    busy = any(engine.num_running_reqs + engine.num_waiting_reqs for engine in stats.engines)
    return "running" if busy else "idle"


def merged(stats: EngineStats, mirrors: dict[int, TraceMirror]) -> EngineStats:
    """The published statistics, each engine core's as of its mirror where that is not long behind.

    What a mirror's blocks and requests say, and its numbers, are of one moment. What is changed without a step, such as
    a pause, is taken from whichever is newer.
    """
    published = {engine.engine_index: engine for engine in stats.engines}
    engines = dict(published)
    for rank, mirror in mirrors.items():
        if mirror.seq is None:
            continue
        known = published.get(rank)
        if known is None or mirror.time > stats.timestamp:
            engines[rank] = mirror.stats
        elif not is_blank(known) and mirror.time > stats.timestamp - TRACE_LAG:
            engines[rank] = msgspec.structs.replace(
                mirror.stats,
                current_wave=known.current_wave,
                engines_running=known.engines_running,
                num_dummy_steps=known.num_dummy_steps,
                is_paused=known.is_paused,
                sleep_level=known.sleep_level,
                workers=known.workers or mirror.stats.workers,
            )
    return msgspec.structs.replace(stats, engines=[engine for _, engine in sorted(engines.items())])


def is_blank(stats: SchedulerStats) -> bool:
    """Whether nothing is known of an engine core: it has not reported yet, or has ended and is being started again."""
    return stats == SchedulerStats(engine_index=stats.engine_index)
