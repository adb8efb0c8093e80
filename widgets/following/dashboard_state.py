"""The state that a dashboard shows at one moment: the seam between following an engine and drawing it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbengine.client.observe.trace_mirror import RequestView, TraceMirror
from nbengine.metrics.stats import EngineStats
from nbengine.widgets.waves.timeline import WaveTimeline


@dataclass(frozen=True, slots=True)
class EngineLabel:
    """The facts that do not change while an engine runs."""

    name: str
    model: str
    topology: str
    """"1 engine core", "TP 2 × PP 2", "DP 2 × TP 2"."""
    device: str
    dtype: str
    lock_step: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of the last seconds, from what the engine cores have published; None where nothing is known.

    The times to the first token and between tokens are medians in seconds, measured inside the engine.
    """

    tokens_in_per_second: float | None = None
    """Prompt tokens computed per second, without those found in the prefix cache."""
    tokens_out_per_second: float | None = None
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    memory_bytes: int | None = None
    """The memory of all workers together, in bytes."""
    first_token_tail: tuple[float | None, float | None] = (None, None)
    """The 95th and the 99th percentile of the times to the first token, in seconds."""
    inter_token_tail: tuple[float | None, float | None] = (None, None)
    """The same of the times between tokens."""


@dataclass(frozen=True, slots=True)
class DashboardState:
    """One moment of an engine.

    `mirrors` are live objects, which may be read only at once and on the thread that gave the state.
    """

    label: EngineLabel
    state: str
    """"starting", "running", "idle", "paused", "asleep" or "ended"."""
    time: float
    """`time.time()` of the newest message; the state is as of that time."""
    stats: EngineStats
    """The published statistics, with those of each mirror's latest message where these are newer."""
    rates: Rates
    mirrors: Mapping[int, TraceMirror]
    """The mirrors by rank."""
    waves: WaveTimeline
    own_requests: Mapping[str, bool]
    """Engine request ids of this notebook's unfinished requests; True if the running cell waits for one."""
    note: str = ""
    """The reason why the engine ended, or a note that something was lost."""

    def requests(self, limit: int) -> Sequence[tuple[int, RequestView]]:
        """List (rank, request): the unfinished ones in the order of arrival, then the latest ended ones."""
        unfinished = [
            (rank, request) for rank, mirror in self.mirrors.items() for request in mirror.requests.values()
        ]
        unfinished.sort(key=lambda item: item[1].added.time)
        ended = [
            (rank, request)
            for rank, mirror in self.mirrors.items()
            for request in itertools.islice(reversed(mirror.finished.values()), limit)
        ]
        ended.sort(key=lambda item: item[1].ended_at or 0.0, reverse=True)
        return (unfinished + ended)[:limit]
