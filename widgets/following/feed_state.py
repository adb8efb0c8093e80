"""The state of a followed engine: messages in, a `DashboardState` out; it reads only the connection file."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.config import ParallelConfig
from nbengine.errors import WireError
from nbengine.ipc.control_messages import EngineReady
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.metrics.trace import TraceBatch, TraceMessage, TraceSnapshot
from nbengine.runtime.connection import ConnectionInfo, newest
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel, Rates
from nbengine.widgets.following.ownership import WAITING, Owner, own_requests
from nbengine.widgets.following.rates import RateMeter
from nbengine.widgets.waves.timeline import WaveRecorder

logger = logging.getLogger(__name__)

TRACE_LAG = 0.5
"""The most seconds that a mirror may be older than the published statistics and still be shown: an engine
core that makes steps sends its trace more often."""
WAVE_SPANS = 1_200
"""The number of wave spans that are kept: two minutes of a busy engine."""
LOSS_SECONDS = 30.0
"""Seconds for which the state notes that messages were lost."""


class FeedState:
    """The state of one engine, to be used by one thread at a time."""

    def __init__(self, info: ConnectionInfo) -> None:
        self._info = info
        self._label = label_of(info)
        self._labelled: object = None
        self._stats = EngineStats()
        self._mirrors: dict[int, TraceMirror] = {}
        self._heard: set[int] = set()
        """Ranks whose mirrors go on from a snapshot of this subscription."""
        self.has_stats = False
        """Statistics of the engine cores have come since the subscription began."""
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
        """Only another subscription can continue the mirrors."""

    @property
    def ended(self) -> bool:
        """Return whether the engine has ended."""
        return self._ended_because is not None

    @property
    def changed(self) -> bool:
        """Return whether a state would differ from the last one: by a message, or by a falling rate."""
        rates = self._rates
        moves = (rates.tokens_in_per_second, rates.tokens_out_per_second, rates.inter_token_latency)
        return self._has_news or any(moves)

    @property
    def is_known(self) -> bool:
        """Return whether every engine core has reported its state since the subscription began."""
        return self.has_stats and all(engine.engine_index in self._heard for engine in self._stats.engines)

    def begin_subscription(self) -> None:
        """Note that a subscription begins: the known state is from before it."""
        self.is_disconnected = self.has_stats = False
        self._heard.clear()
        self._recorder.break_off()

    def add_owner(self, owner: Owner) -> None:
        """Add a client of this process that has the engine."""
        if not any(owner.same_as(known) for known in self._owners):
            self._owners.append(owner)

    @property
    def owners(self) -> Sequence[Owner]:
        """Return the clients of this process that have the engine."""
        return self._owners

    def take(self, message: object) -> None:
        """Take in a message that the engine has published."""
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
        """Note how many times the subscriber has lost messages, as far as it knows."""
        if num_losses > self._num_losses:
            self._lost_at = time.monotonic()
        self._num_losses = num_losses

    def cause_of_death(self) -> str | None:
        """Say why the engine has ended, if a client of this process knows."""
        causes = (owner.cause_of_death() for owner in self._owners)
        return next((cause for cause in causes if cause is not None), None)

    def end(self, reason: str) -> None:
        """Note that the engine has ended."""
        self._ended_because = reason
        self._has_news = True

    def build(self, now: float) -> DashboardState:
        """Make the state at `now`, a `time.time()` of this machine."""
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
        """Read the connection file again for the label, when the engine cores have changed."""
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
    """Make the label of an engine from its connection info."""
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
    """Describe how the engine is divided, as in `TP 2 × PP 2`; `1 engine core` where nothing is divided."""
    sizes = {
        "DP": parallel.data_parallel_size,
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
    }
    return " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 engine core"


def state_word(info: ConnectionInfo, stats: EngineStats) -> str:
    """Choose the word for the state: "starting", "asleep", "paused", "running" or "idle"."""
    if not stats.engines:
        return "idle" if info.ready else "starting"
    if any(engine.is_sleeping for engine in stats.engines):
        return "asleep"
    if any(engine.is_paused for engine in stats.engines):
        return "paused"
    busy = any(engine.num_running_reqs + engine.num_waiting_reqs for engine in stats.engines)
    return "running" if busy else "idle"


def merged(stats: EngineStats, mirrors: dict[int, TraceMirror]) -> EngineStats:
    """Merge the published statistics with those of the mirrors that are not long behind.

    The figures of a mirror are of the same moment as its blocks and requests. Figures that change without a
    step, such as a pause, are taken from the newer one of the two.
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
    """Return whether nothing is known of an engine core: it has not reported yet, or restarts."""
    return stats == SchedulerStats(engine_index=stats.engine_index)
