"""Stat loggers, which are given an engine's statistics whenever they change, and the one that writes a line."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol, Self

from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.metrics.intervals import Interval
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

LOG_INTERVAL = 10.0
"""Seconds between two lines about an engine that works."""
LOOK_INTERVAL = 1.0
"""Seconds after which a follower looks whether the engine still runs, and whether it is to end."""


class StatLogger(Protocol):
    """A reader of an engine's statistics, called on a thread of its own kind."""

    def record(self, stats: EngineStats) -> None:
        """Take in the newest statistics: at most ten times a second while the engine works, and when it goes
        idle."""


class LoggingStatLogger:
    """A stat logger that logs a line at level INFO every ten seconds while there is work.

    Args:
        name: the engine's name.
        interval: seconds between two lines.
    """

    def __init__(self, name: str, interval: float = LOG_INTERVAL) -> None:
        self._name = name
        self._interval = interval
        self._since: EngineStats | None = None
        """The statistics at the end of the last line, or when work began after that."""
        self._newest: EngineStats | None = None
        self._logged_at = -math.inf

    def record(self, stats: EngineStats) -> None:
        """Log a line if one is due."""
        before, self._newest = self._newest, stats
        if before is None or self._since is None:
            self._since = stats
            return
        was_running, runs = before.engines_running, stats.engines_running
        if runs and not was_running:
            self._begin(before, stats)
        elif stats.timestamp - self._since.timestamp >= self._interval:
            self._log(stats)
        elif was_running and not runs and stats.timestamp - self._logged_at >= self._interval:
            # A short piece of work gets a line when it is done, but not each of many.
            self._log(stats)

    def _begin(self, before: EngineStats, stats: EngineStats) -> None:
        """Note that work begins; the idle time before it counts for no line."""
        if self._since is not None and not self._interval_until(before, self._since).is_idle:
            if stats.timestamp - before.timestamp < self._interval:
                return
            self._log(before)
        self._since = EngineStats(before.engines, timestamp=stats.timestamp)

    def _log(self, stats: EngineStats) -> None:
        if self._since is not None:
            interval = self._interval_until(stats, self._since)
            if stats.engines_running or not interval.is_idle:
                logger.info("%s", self.line(stats, interval))
                self._logged_at = stats.timestamp
        self._since = stats

    @staticmethod
    def _interval_until(stats: EngineStats, since: EngineStats) -> Interval:
        return Interval.between(since.engines, stats.engines, stats.timestamp - since.timestamp)

    def line(self, stats: EngineStats, interval: Interval) -> str:
        """Return the line about an interval that ends with `stats`."""
        cores = stats.engines
        running = sum(core.num_running_reqs for core in cores)
        waiting = sum(core.num_waiting_reqs for core in cores)
        blocks = sum(core.num_blocks for core in cores)
        used = blocks - sum(core.num_free_blocks for core in cores)
        parts = [
            f"{running:,} running, {waiting:,} waiting",
            f"prompts {interval.per_second(interval.prompt_tokens):,.1f} tokens/s",
            f"generation {interval.per_second(interval.generation_tokens):,.1f} tokens/s",
            f"KV cache {used / blocks if blocks else 0:.1%} in use",
        ]
        if interval.hit_rate is not None:
            parts.append(f"prefix cache {interval.hit_rate:.1%} found")
        first = interval.requests.time_to_first_token
        if (median := first.quantile(0.5)) is not None:
            parts.append(f"first token after {median:.3g} s in half of {first.count:,} requests")
        if interval.requests.num_finished:
            parts.append(f"{interval.requests.num_finished:,} requests ended")
        if interval.preemptions:
            parts.append(f"{interval.preemptions:,} preemptions")
        return f"engine {self._name}: " + ", ".join(parts)


class StatsSource(AbstractContextManager["StatsSource"], Protocol):
    """The part of `StatsSubscriber` that a follower reads."""

    def poll(self, timeout: float | None = None) -> object:
        """Return the next message, None if there is none within `timeout` seconds."""


class StatsFollower:
    """A thread that follows an engine's statistics for stat loggers, until `close` or the engine's end.

    It needs no client. A stat logger that fails is logged and left out from then on.

    Raises:
        NBEngineError: there is no room for a socket.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        stat_loggers: Sequence[StatLogger] = (),
        source: StatsSource | None = None,
    ) -> None:
        self.newest = EngineStats()
        """The newest statistics; without engine cores before the first ones have come."""
        self._info = info
        self._stat_loggers = list(stat_loggers)
        self._source = source or StatsSubscriber(info)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"nbengine-stats-{info.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following, and wait until the thread has ended."""
        self._closed.set()
        self._thread.join()

    @property
    def is_running(self) -> bool:
        """Tell whether statistics are still followed."""
        return self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        with self._source as source:
            while not self._closed.is_set():
                message = source.poll(LOOK_INTERVAL)
                if isinstance(message, EngineStats):
                    self._take(message)
                elif message is None and not self._info.host_alive:
                    return

    def _take(self, stats: EngineStats) -> None:
        self.newest = stats
        for stat_logger in list(self._stat_loggers):
            try:
                stat_logger.record(stats)
            except Exception:
                logger.exception("a stat logger of engine %s has failed, and is left out", self._info.name)
                self._stat_loggers.remove(stat_logger)
