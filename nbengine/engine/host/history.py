"""The history that a host keeps of its engine cores: their figures by the second for an hour, by tens for a day.

It is a state machine without I/O. It learns from the engine cores' reports alone, so that an engine that
rests costs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from nbengine.engine.host.row_ring import RowRing
from nbengine.ipc.control_messages import HistoryPage, ReadHistory
from nbengine.metrics.histograms import Seconds
from nbengine.metrics.history import COARSE, DAY, FINE, HOUR, HistoryRow, width_of
from nbengine.metrics.intervals import Interval
from nbengine.metrics.requests import added_up
from nbengine.metrics.stats import SchedulerStats

ROWS = {FINE: HOUR // FINE, COARSE: DAY // COARSE}
"""The most rows of an engine core, by their seconds."""
WHOLE_RANKS = 4
"""Engine cores that have as many rows; where there are more, each has as much less. All rows together take
8 MB at most."""
PAGE_ROWS = 1000
"""The most rows of a `HistoryPage`, which takes 150 kB then."""
CLOCK_STEP = 0.5
"""Rows follow the time of day when it has left the host's clock by more than these seconds: then somebody has
set it, or the machine has slept. Less is a clock that is being corrected."""

_Load = tuple[int, int, float]
_REST: _Load = (0, 0, 0.0)


class HostHistory:
    """The rows of all engine cores.

    A row counts what was reported in its interval. Reports that come late count when they come. A row is
    stored when the first report after its interval comes, unless it says only that nothing has changed.

    Callers pass the time of any clock that never goes back and is never negative; `wall_clock` is read once a
    second at most, for the rows' `time`.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._offset = -math.inf
        self._ranks: dict[int, _RankHistory] = {}

    def observe(self, rank: int, stats: SchedulerStats, now: float) -> None:
        """Take in an engine core's report, whose counts go on from those of its report before."""
        known = self._ranks.get(rank)
        if known is None:
            known = self._ranks[rank] = _RankHistory(rank, self._time_of)
            self._share_room()
        known.observe(stats, now)

    def lost(self, rank: int, now: float) -> None:
        """Note that an engine core is gone: nothing is known until its successor reports, which counts from 0."""
        if rank in self._ranks:
            self._ranks[rank].lost(now)

    def stood(self, seconds: float, now: float) -> None:
        """Note that the host did not run for `seconds` until `now`, so that nothing is known of that time."""
        for known in self._ranks.values():
            known.stood(seconds, now)

    def read(self, asked: ReadHistory, now: float) -> HistoryPage:
        """Return the rows of the last `asked.last` seconds, and the row before them, as far as a page holds."""
        rows = list(itertools.islice(self._rows(asked, now), PAGE_ROWS + 1))
        return HistoryPage(rows[:PAGE_ROWS], now, more=len(rows) > PAGE_ROWS)

    @property
    def num_bytes(self) -> int:
        """Return the bytes that the stored rows take."""
        return sum(track.rows.num_bytes for known in self._ranks.values() for track in known.tracks.values())

    def _rows(self, asked: ReadHistory, now: float) -> Iterator[HistoryRow]:
        for rank, known in sorted(self._ranks.items()):
            if asked.rank not in (None, rank) or (asked.after is not None and rank < asked.after[0]):
                continue
            goes_on = asked.after is not None and rank == asked.after[0]
            after = asked.after[1] if asked.after is not None and goes_on else None
            yield from known.rows(width_of(asked.last), now - asked.last, after)

    def _share_room(self) -> None:
        share = max(WHOLE_RANKS, len(self._ranks))
        for known in self._ranks.values():
            for width, track in known.tracks.items():
                track.rows.resize(ROWS[width] * WHOLE_RANKS // share)

    def _time_of(self, start: int, now: float) -> float:
        """Return the time of day at `start`; it agrees among engine cores, and from row to row."""
        offset = self._wall_clock() - now
        if abs(offset - self._offset) > CLOCK_STEP:
            self._offset = offset
        return start + self._offset


class _RankHistory:
    """The rows of one engine core, and the intervals that are being counted."""

    def __init__(self, rank: int, time_of: Callable[[int, float], float]) -> None:
        self._rank = rank
        self._time_of = time_of
        self.tracks = {width: _Track(rank, width) for width in ROWS}
        self._second = -1
        """The second of the latest news."""
        self._newest: SchedulerStats | None = None
        """The newest report of the engine core that runs; None: it is gone."""
        self._running = self._waiting = 0
        self._usage = 0.0
        """The most of each in this second."""

    def observe(self, stats: SchedulerStats, now: float) -> None:
        """Take in a report."""
        if now >= self._second + 1:
            self._turn(now)
        self._newest = stats
        self._running = max(self._running, stats.num_running_reqs)
        self._waiting = max(self._waiting, stats.num_waiting_reqs)
        if (usage := stats.kv_cache_usage) > self._usage:
            self._usage = usage

    def lost(self, now: float) -> None:
        """Note that the engine core is gone."""
        if self._newest is None:
            return
        self._go_to(now)
        for track in self.tracks.values():
            track.begin_again(self._newest)
        self._newest = None

    def stood(self, seconds: float, now: float) -> None:
        """Note that nothing is known of the `seconds` before `now`."""
        if self._newest is None:
            return
        if now - seconds >= self._second + 1:
            self._turn(now - seconds, clock=now)
        if now >= self._second + 1:
            self._turn(now, known=False)

    def rows(self, width: int, since: float, after: int | None) -> Iterator[HistoryRow]:
        """Yield the rows that begin after `after`, or, if that is None, from the last one before `since` on."""
        track = self.tracks[width]
        stored = track.rows
        first = max(0, stored.behind(since) - 1) if after is None else stored.behind(after)
        for index in range(first, len(stored)):
            yield stored[index]
        under_way = track.row(self._newest, self._load)
        if under_way is not None and (after is None or under_way.start > after):
            yield under_way

    @property
    def _load(self) -> _Load:
        return self._running, self._waiting, self._usage

    def _go_to(self, now: float) -> None:
        if now >= self._second + 1:
            self._turn(now)

    def _turn(self, now: float, *, known: bool = True, clock: float | None = None) -> None:
        """Begin another second; `known`: the state from the latest news until now is known.

        `clock` is the present time, if `now` is past.
        """
        second, present = int(now), now if clock is None else clock
        for track in self.tracks.values():
            track.turn(second, self._newest, self._load, known, lambda start: self._time_of(start, present))
        self._second = second
        self._running, self._waiting, self._usage = _load_of(self._newest)


class _Track:
    """The rows of one width, and the interval that is being counted."""

    def __init__(self, rank: int, width: int) -> None:
        self.rows = RowRing(rank, width, ROWS[width])
        self._rank = rank
        self._width = width
        self._start: int | None = None
        self._time = 0.0
        self._base: SchedulerStats | None = None
        """The report with which the interval began; None: the engine core has begun in it."""
        self._former: list[Interval] = []
        """The work of engine cores that were lost in the interval."""
        self._load = _REST
        """The most in the seconds of the interval before the present one."""
        self._latest: HistoryRow | None = None
        """The row that was stored last."""

    def turn(
        self,
        second: int,
        newest: SchedulerStats | None,
        load: _Load,
        known: bool,
        time_of: Callable[[int], float],
    ) -> None:
        """Go on to another second; `newest` and `load` are those of the second before."""
        start = second - second % self._width
        if start == self._start:
            self._load = _most(self._load, load)
            return
        done = self.row(newest if known else None, load, newest)
        if done is not None and not self._says_nothing(done):
            self.rows.append(done)
            self._latest = done
        self._start, self._time = start, time_of(start)
        self._base, self._former, self._load = newest, [], _REST

    def begin_again(self, newest: SchedulerStats) -> None:
        """Count on from an engine core that is gone; `newest` is its last report."""
        self._former.append(self._since_base(newest))
        self._base = None

    def row(
        self, state: SchedulerStats | None, load: _Load, counts: SchedulerStats | None = None
    ) -> HistoryRow | None:
        """Return the row of the interval as far as it has come; None before the first report.

        Args:
            state: the report that tells the state after the interval; None: nothing is known of that.
            load: the most of the present second.
            counts: the report whose counts end the interval, if it is not `state`.
        """
        if self._start is None:
            return None
        counts = counts or state
        work = [*self._former, *([] if counts is None else [self._since_base(counts)])]
        requests = added_up(each.requests for each in work)
        running, waiting, usage = _most(self._load, load)
        return HistoryRow(
            self._rank,
            self._start,
            self._width,
            self._time,
            sum(each.generation_tokens for each in work),
            sum(each.prompt_tokens for each in work),
            sum(each.prefix_cache_queries for each in work),
            sum(each.prefix_cache_hits for each in work),
            sum(each.preemptions for each in work),
            *_percentiles(requests.time_to_first_token),
            *_percentiles(requests.inter_token_latency),
            running,
            waiting,
            usage,
            *((None, None, None) if state is None else _load_of(state)),
        )

    def _since_base(self, newest: SchedulerStats) -> Interval:
        earlier = [] if self._base is None else [self._base]
        return Interval.between(earlier, [newest], self._width)

    def _says_nothing(self, row: HistoryRow) -> bool:
        """Tell whether a row is what the row before says of the time after it."""
        before = None if self._latest is None else self._latest.state_after
        same = before is not None and before == row.state_after == (row.running, row.waiting, row.kv_usage)
        counts = (row.generation_tokens, row.prompt_tokens, row.prefix_cache_queries, row.preemptions)
        return same and not any(counts) and row.ttft_p50 is None and row.itl_p50 is None


def _percentiles(histogram: Seconds) -> tuple[float | None, float | None, float | None]:
    return histogram.quantile(0.5), histogram.quantile(0.95), histogram.quantile(0.99)


def _load_of(stats: SchedulerStats | None) -> _Load:
    if stats is None:
        return _REST
    return stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage


def _most(one: _Load, other: _Load) -> _Load:
    return max(one[0], other[0]), max(one[1], other[1]), max(one[2], other[2])
