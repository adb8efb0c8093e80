"""An engine's history in slices of equal time, for tables and charts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nbengine.metrics.history import HistoryRow, MetricsHistory

MAX_COLUMNS = 120
"""The most slices of a chart."""
LATENCIES = ("ttft_p50", "ttft_p95", "ttft_p99", "itl_p50", "itl_p95", "itl_p99")
_ROUNDING = 1e-6


@dataclass(slots=True)
class Slice:
    """The figures of one engine core in a part of the time."""

    time: float
    """The beginning, as `time.time()`."""
    known: float = 0.0
    """The seconds of which something is known."""
    is_gap: bool = True
    """Nothing is known of the slice, or of a part of it."""
    tokens_per_second: float = 0.0
    """The mean over what is known, as in the following one."""
    prompt_tokens_per_second: float = 0.0
    """Those of prompts, also those that were found in the prefix cache."""
    ttft_p50: float | None = None
    """The highest of the rows' percentiles, as in the following ones; None: there are none."""
    ttft_p95: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p95: float | None = None
    itl_p99: float | None = None
    running: int = 0
    """The most at one time, as in the following two."""
    waiting: int = 0
    kv_usage: float = 0.0
    preemptions: int = 0
    prefix_cache_queries: float = 0.0
    """The prompt tokens that were looked up, and how many of them were found."""
    prefix_cache_hits: float = 0.0

    @property
    def clock(self) -> str:
        """Return the beginning as a local time of day."""
        return time.strftime("%H:%M:%S", time.localtime(self.time))


class Trends:
    """The slices of each engine core, over the time from the first row of any of them on."""

    def __init__(self, history: MetricsHistory) -> None:
        self._history = history
        first = min((span.start for span in history.spans), default=history.now)
        self._begin = max(first, history.since)
        self._end = max(history.now, self._begin + 1.0)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that have slices."""
        return self._history.ranks

    @property
    def seconds(self) -> float:
        """Return the length of the time."""
        return self._end - self._begin

    def of_rank(self, rank: int, most: int) -> list[Slice]:
        """Divide the time of an engine core into `most` slices, or fewer that are as long as the shortest row.

        The slices of all engine cores are equally long.
        """
        spans = [span for span in self._history.spans if span.rank == rank]
        if not spans:
            return []
        least = min(span.seconds for span in self._history.spans)
        count = max(1, min(most, math.ceil(self.seconds / max(least, 1.0))))
        width = self.seconds / count
        slices = [Slice(moment) for moment in self._times(spans, count, width)]
        for span in spans:
            self._add(span, slices, width)
        for part in slices:
            part.is_gap = part.known < width * (1 - _ROUNDING)
            if part.known:
                part.tokens_per_second /= part.known
                part.prompt_tokens_per_second /= part.known
        return slices

    def _times(self, spans: Sequence[HistoryRow], count: int, width: float) -> Iterator[float]:
        latest = 0
        for index in range(count):
            begin = self._begin + index * width
            while latest + 1 < len(spans) and spans[latest + 1].start <= begin:
                latest += 1
            yield spans[latest].time + begin - spans[latest].start

    def _add(self, span: HistoryRow, slices: list[Slice], width: float) -> None:
        begin, end = max(span.start, self._begin), min(span.end, self._end)
        first = int((begin - self._begin) / width)
        for index in range(first, len(slices)):
            left = self._begin + index * width
            shared = min(end, left + width) - max(begin, left)
            if left >= end:
                return
            if shared > 0:
                _count(span, slices[index], shared, is_first=index == first)


def _count(span: HistoryRow, part: Slice, shared: float, *, is_first: bool) -> None:
    part.known += shared
    weight = shared / span.seconds
    part.tokens_per_second += span.generation_tokens * weight
    part.prompt_tokens_per_second += span.prompt_tokens * weight
    part.prefix_cache_queries += span.prefix_cache_queries * weight
    part.prefix_cache_hits += span.prefix_cache_hits * weight
    part.running = max(part.running, span.running)
    part.waiting = max(part.waiting, span.waiting)
    part.kv_usage = max(part.kv_usage, span.kv_usage)
    if is_first:
        part.preemptions += span.preemptions
    for name in LATENCIES:
        values = [value for value in (getattr(part, name), getattr(span, name)) if value is not None]
        setattr(part, name, max(values, default=None))


@dataclass(frozen=True, slots=True)
class Curve:
    """One quantity of a chart."""

    name: str
    role: str
    """Its colour, one of `nbengine.widgets.dashboard.palette.ROLES`."""
    value: Callable[[Slice], float | None]
    on: Callable[[Slice], float] = lambda part: 0.0  # noqa: ARG005
    """The quantity upon which a picture draws it."""


CHARTS: dict[str, tuple[Curve, ...]] = {
    "tokens/s": (Curve("generated", "decode", lambda part: part.tokens_per_second),),
    "requests": (
        Curve("waiting", "waiting", lambda part: part.waiting, lambda part: part.running),
        Curve("running", "running", lambda part: part.running),
    ),
    "first token": (
        Curve("p95", "cached", lambda part: part.ttft_p95),
        Curve("p50", "prefill", lambda part: part.ttft_p50),
    ),
    "between tokens": (
        Curve("p95", "cached", lambda part: part.itl_p95),
        Curve("p50", "decode", lambda part: part.itl_p50),
    ),
    "KV cache in use": (Curve("most", "running", lambda part: part.kv_usage),),
    "preemptions": (Curve("preempted", "preempted", lambda part: part.preemptions),),
}
"""The charts by title; of several curves the last one is drawn in front."""
