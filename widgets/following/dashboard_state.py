"""What a dashboard shows at one moment: the seam between what follows an engine and what draws it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbengine.client.trace_mirror import RequestView, TraceMirror
from nbengine.metrics.stats import EngineStats
from nbengine.widgets.waves.timeline import WaveTimeline


@dataclass(frozen=True, slots=True)
class EngineLabel:
    """What does not change while an engine runs."""

    name: str
    model: str
    topology: str
    """"1 engine core", "TP 2 × PP 2", "DP 2 × TP 2"."""
    device: str
    dtype: str
    lock_step: bool = False


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured over the last seconds from what the engine cores have published; None where nothing is known.

    Times to the first token and between tokens are those inside the engine: medians in seconds.
    """

    tokens_in_per_second: float | None = None
    """Prompt tokens computed, without those found in the prefix cache."""
    tokens_out_per_second: float | None = None
    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    memory_bytes: int | None = None
    """Of all workers together."""


@dataclass(frozen=True, slots=True)
class DashboardState:
    """One moment of an engine. `mirrors` are live objects: to be read on the thread that gave the state, at once."""

    label: EngineLabel
    state: str
    """"starting", "running", "idle", "paused", "asleep" or "ended"."""
    time: float
    """`time.time()` of the newest message; what is shown is how things stood then."""
    stats: EngineStats
    """As published, with the statistics of each mirror's latest message where these are newer."""
    rates: Rates
    mirrors: Mapping[int, TraceMirror]
    """By rank."""
    waves: WaveTimeline
    own_requests: Mapping[str, bool]
    """Engine request ids of this notebook's unfinished requests; whether the cell that is running waits for it."""
    note: str = ""
    """Why it ended, or that something was lost."""

    def requests(self, limit: int) -> Sequence[tuple[int, RequestView]]:
        """(rank, request): the unfinished ones in the order in which they came, then the latest that have ended."""
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
