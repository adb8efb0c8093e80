"""The host's history says of each second what was reported in it, whatever comes when: compared with brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.engine.host import history as module
from nbengine.engine.host.coordinator import DPCoordinator
from nbengine.engine.host.history import PAGE_ROWS, ROWS, WHOLE_RANKS, HostHistory
from nbengine.engine.host.row_ring import ROW_BYTES, RowRing
from nbengine.ipc.control_messages import HistoryPage, ReadHistory
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.messages import EngineCoreOutputs
from nbengine.metrics.histograms import Seconds
from nbengine.metrics.history import DAY, HOUR, HistoryRow, MetricsHistory, width_of
from nbengine.metrics.requests import RequestStats
from nbengine.metrics.stats import SchedulerStats
from tests.support.thorough import amount

BEGIN = 1000.125
FIGURES = ("generation_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions")
MOST_BYTES = 8_000_000


def read_all(history: HostHistory, last: float, now: float, rank: int | None = None) -> MetricsHistory:
    """Read page by page, each over the wire."""
    rows: list[HistoryRow] = []
    decoder: ControlDecoder[HistoryPage] = ControlDecoder(HistoryPage)
    asked = ReadHistory(last, rank)
    while True:
        frame = encode_control(history.read(asked, now))
        assert len(frame) < 300_000
        page = decoder.decode(frame)
        assert len(page.rows) <= PAGE_ROWS
        rows += page.rows
        if not page.more:
            return MetricsHistory(rows, now - last, page.now)
        asked = ReadHistory(last, rank, (rows[-1].rank, rows[-1].start))


Load = tuple[int, int, float]


@dataclass(eq=False)
class Report:
    """The news of a report: what was done since the one before, and the state."""

    time: float
    done: tuple[int, ...]
    load: Load
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)


@dataclass(eq=False)
class Lost:
    """The end of an engine core."""

    time: float


@dataclass(eq=False)
class Stood:
    """A time in which the host did not run, and its end."""

    since: float
    time: float


@dataclass(eq=False)
class Core:
    """An engine core, and all that has happened to it."""

    rank: int
    stats: SchedulerStats | None = None
    events: list[Report | Lost | Stood] = field(default_factory=list)

    def load_at(self, moment: float) -> Load | None:
        """Return the state just before a moment; None: nothing is known of it."""
        if any(isinstance(event, Stood) and event.since < moment < event.time for event in self.events):
            return None
        return last_load([event for event in self.events if event.time < moment])

    def expected(self, begin: float, end: float) -> tuple | None:
        """Return all that can be said of an interval, from all events; None: nothing is known of any part of it."""
        inside = [event for event in self.events if begin <= event.time < end]
        reports = [event for event in inside if isinstance(event, Report)]
        loads = [self.load_at(begin), *(event.load for event in reports)]
        # A host that goes on finds the state that it left.
        loads += [
            last_load(self.events[:i])
            for i, e in enumerate(self.events)
            if e in inside and isinstance(e, Stood)
        ]
        known = [load for load in loads if load is not None]
        if not known:
            return None
        first, between = Seconds(), Seconds()
        for report in reports:
            for value in report.first:
                first.observe(value)
            for value in report.between:
                between.observe(value, 2)
        return (
            *(sum(report.done[column] for report in reports) for column in range(len(FIGURES))),
            *(first.quantile(share) for share in (0.5, 0.95, 0.99)),
            *(between.quantile(share) for share in (0.5, 0.95, 0.99)),
            *(max(load[column] for load in known) for column in range(3)),
        )


def last_load(events: Sequence[Report | Lost | Stood]) -> Load | None:
    """Return the state after these events, which no host that stood has changed."""
    changes = [event for event in events if not isinstance(event, Stood)]
    return changes[-1].load if changes and isinstance(changes[-1], Report) else None


NEWS = st.tuples(
    st.integers(0, 50),
    st.integers(0, 20),
    st.integers(0, 3),
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 4)),
    st.lists(st.floats(0.0001, 4000), max_size=3),
    st.lists(st.floats(0.0001, 100), max_size=3),
)
# Binary fractions, so that no sum of them is rounded.
STEPS = st.one_of(
    st.tuples(st.just("report"), st.integers(0, 2), NEWS),
    st.tuples(st.just("repeat"), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.sampled_from([0.015625, 0.375, 0.875, 1.0, 3.75, 10.0, 61.25, 700.0])),
    st.tuples(st.just("lose"), st.integers(0, 2)),
    st.tuples(st.just("stand"), st.sampled_from([0.25, 1.5, 25.0])),
    st.tuples(st.just("set_clock"), st.sampled_from([-100_000.0, -3.0, 0.001, 4000.0])),
)


class World:
    """Engine cores, a clock that goes on, a time of day that jumps, and the history of all that."""

    def __init__(self) -> None:
        self.now = BEGIN
        self.offset = 1.7e9
        self.history = HostHistory(lambda: self.now + self.offset)
        self.cores = [Core(rank) for rank in range(3)]

    def report(self, rank: int, news: tuple) -> None:
        generated, prompt, preempted, (running, waiting, used), first, between = news
        core = self.cores[rank]
        before = core.stats or SchedulerStats(engine_index=rank, num_blocks=4, num_free_blocks=4)
        requests = (before.requests or RequestStats()).copy()
        for value in first:
            requests.time_to_first_token.observe(value)
        for value in between:
            requests.inter_token_latency.observe(value, 2)
        core.stats = msgspec.structs.replace(
            before,
            num_generation_tokens=before.num_generation_tokens + generated,
            num_prompt_tokens=before.num_prompt_tokens + prompt,
            prefix_cache_queries=before.prefix_cache_queries + prompt,
            prefix_cache_hits=before.prefix_cache_hits + prompt // 2,
            num_preemptions=before.num_preemptions + preempted,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_free_blocks=4 - used,
            requests=requests,
        )
        done = (generated, prompt, prompt, prompt // 2, preempted)
        core.events.append(Report(self.now, done, (running, waiting, used / 4), first, between))
        self.history.observe(rank, core.stats, self.now)

    def repeat(self, rank: int) -> None:
        """Report nothing new."""
        core = self.cores[rank]
        if core.stats is not None:
            load = core.load_at(math.inf)
            assert load is not None
            core.events.append(Report(self.now, (0,) * len(FIGURES), load))
            self.history.observe(rank, core.stats, self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def lose(self, rank: int) -> None:
        self.cores[rank].events.append(Lost(self.now))
        self.cores[rank].stats = None
        self.history.lost(rank, self.now)

    def stand(self, seconds: float) -> None:
        self.now += seconds
        for core in self.cores:
            core.events.append(Stood(self.now - seconds, self.now))
        self.history.stood(seconds, self.now)

    def set_clock(self, by: float) -> None:
        self.offset += by

    def check(self, last: float) -> None:
        found = read_all(self.history, last, self.now)
        width = width_of(last)
        said = {core.rank: told_by(found, core.rank, width) for core in self.cores}
        moments = [event.time for core in self.cores for event in core.events]
        moments += [event.since for event in self.cores[0].events if isinstance(event, Stood)]
        near = {int(moment) // width * width + place * width for moment in moments for place in (-1, 0, 1, 2)}
        for start in sorted(near):
            if self.now - last <= start < self.now:
                for core in self.cores:
                    assert said[core.rank].get(start) == core.expected(start, start + width), (
                        core.rank,
                        start,
                    )


def told_by(history: MetricsHistory, rank: int, width: int) -> dict[int, tuple]:
    """Return all that a history says of each interval of an engine core; no two rows may tell of the same."""
    said: dict[int, tuple] = {}
    for span in history.spans:
        if span.rank == rank:
            figures = tuple(getattr(span, name) for name in FIGURES)
            latencies = (
                span.ttft_p50,
                span.ttft_p95,
                span.ttft_p99,
                span.itl_p50,
                span.itl_p95,
                span.itl_p99,
            )
            start = span.start // width * width
            while start < span.end:
                assert start not in said
                said[start] = (*figures, *latencies, span.running, span.waiting, span.kv_usage)
                start += width
    return said


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=amount(50, thorough=5000), deadline=None)
def test_every_interval_tells_what_was_reported_in_it_and_nothing_where_nothing_was_known(
    steps: list,
) -> None:
    world = World()
    for name, *arguments in steps:
        getattr(world, name)(*arguments)
    world.check(HOUR)
    world.check(DAY)
    # Reading changes nothing.
    world.report(0, (7, 1, 0, (1, 0, 1), [0.5], []))
    world.check(HOUR)


def busy(tokens: int, running: int = 1) -> SchedulerStats:
    return SchedulerStats(num_generation_tokens=tokens, num_running_reqs=running)


def test_an_engine_that_rests_takes_no_room_however_often_it_says_so() -> None:
    history = HostHistory(lambda: 0.0)
    history.observe(0, busy(5, 0), 1.0)
    history.observe(0, busy(5, 0), 2.0)
    before = history.num_bytes
    for second in range(3, 5000):
        history.observe(0, busy(5, 0), float(second))
    assert history.num_bytes <= before + 2 * ROW_BYTES
    found = read_all(history, HOUR, 5000.0)
    assert [(span.seconds, span.generation_tokens) for span in found.spans][:1] == [(3599, 0)]
    assert found.rows()[0]["tokens_per_second"] == 0


def test_an_hour_of_seconds_and_a_day_of_tens_are_kept_and_no_more() -> None:
    history = HostHistory(lambda: 0.0)
    seconds = 2 * HOUR
    for second in range(seconds):
        history.observe(0, busy(second * (second + 1) // 2), second + 0.5)
    fine, coarse = read_all(history, HOUR, float(seconds)), read_all(history, DAY, float(seconds))
    assert [row["generation_tokens"] for row in fine.rows()] == list(range(HOUR, seconds))
    assert sum(row["generation_tokens"] for row in coarse.rows()) == seconds * (seconds - 1) // 2
    assert {row["seconds"] for row in coarse.rows()} == {10}
    assert list(fine) == fine.rows()
    assert (fine[0], fine[-1], len(fine)) == (fine.rows()[0], fine.rows()[-1], HOUR)
    assert history.num_bytes <= 1.07 * (ROWS[1] + seconds // 10) * ROW_BYTES


@pytest.mark.parametrize("ranks", [WHOLE_RANKS, 4 * WHOLE_RANKS])
def test_all_rows_of_any_number_of_engine_cores_take_a_few_megabytes(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS", {width: rows // 50 for width, rows in ROWS.items()})
    history = HostHistory(lambda: 0.0)
    for second in range(200):
        for rank in range(ranks):
            history.observe(rank, busy(second + rank), float(10 * second))
    assert history.num_bytes <= MOST_BYTES / 50 + 200 * 2 * ranks
    newest = read_all(history, HOUR, 2000.0)
    assert newest.ranks == list(range(ranks))


def test_rows_that_have_gone_round_stay_in_order_whatever_room_there_is() -> None:
    ring = RowRing(0, 1, 5)
    for start in range(8):
        ring.append(HistoryRow(0, start, 1, start + 0.25, ttft_p50=None if start % 2 else 0.5))
    assert [ring[index].start for index in range(len(ring))] == [3, 4, 5, 6, 7]
    assert ring[0] == HistoryRow(0, 3, 1, 3.25)
    assert [ring.behind(start) for start in (2, 3, 6.5, 7, 9)] == [0, 1, 4, 5, 5]
    ring.resize(3)
    ring.append(HistoryRow(0, 8, 1, 8.25))
    assert [ring[index].start for index in range(len(ring))] == [6, 7, 8]
    ring.resize(4)
    for start in (9, 10):
        ring.append(HistoryRow(0, start, 1, start))
    assert [ring[index].start for index in range(len(ring))] == [7, 8, 9, 10]
    with pytest.raises(IndexError):
        ring[4]


def test_rows_have_the_time_of_day_and_follow_it_when_the_clock_is_set_not_when_it_is_corrected() -> None:
    offset = [1e9]
    history = HostHistory(lambda: moment[0] + offset[0])
    moment = [0.5]
    for moment[0], change in ((0.5, 0.0), (1.5, 0.01), (2.5, 0.02), (3.5, 8 * HOUR), (4.5, 0.0)):
        offset[0] += change
        history.observe(0, busy(int(moment[0]) + 1), moment[0])
        history.observe(1, busy(1 + int(moment[0])), moment[0] + 0.001)
    rows = read_all(history, 60, 4.6).rows()
    assert [row["time"] - 1e9 for row in rows if row["rank"] == 0] == pytest.approx(
        [0, 1, 2, 3 + 8 * HOUR, 4 + 8 * HOUR], abs=0.1
    )
    assert [row["time"] for row in rows if row["rank"] == 1] == [
        row["time"] for row in rows if row["rank"] == 0
    ]


def test_one_rank_can_be_asked_for_and_one_that_never_was_has_nothing() -> None:
    history = HostHistory(lambda: 0.0)
    for rank in range(3):
        history.observe(rank, busy(rank), 1.0)
    assert read_all(history, 60, 2.5, rank=1).ranks == [1]
    assert len(read_all(history, 60, 2.5, rank=7)) == 0


def test_the_coordinator_keeps_it_and_knows_another_incarnation() -> None:
    state = DPCoordinator(1, wall_clock=lambda: 0.0)
    for tokens, step, incarnation, now in ((5, 1, 0, 1.0), (9, 2, 0, 2.0), (4, 1, 0, 2.5), (13, 1, 1, 4.0)):
        stats = SchedulerStats(step_counter=step, num_generation_tokens=tokens, num_running_reqs=1)
        state.observe(EngineCoreOutputs(scheduler_stats=stats, incarnation=incarnation), now)
    state.forget(0, 6.0)
    rows = read_all(state.history, 60, 9.0).rows()
    assert [(row["seconds"], row["generation_tokens"]) for row in rows] == [
        (1, 5),
        (1, 4),
        (1, 0),
        (1, 13),
        (1, 0),
        (1, 0),
    ]


def test_a_row_that_begins_before_the_host_stood_has_the_time_of_its_own_beginning() -> None:
    now = 100.0
    history = HostHistory(lambda: 1e9 + now)
    for now in (100.2, 101.2):
        history.observe(0, SchedulerStats(num_running_reqs=1), now)
    now = 106.0
    history.stood(1.3, now)
    for now in (106.4, 107.4):
        history.observe(0, SchedulerStats(num_running_reqs=2), now)
    rows = history.read(ReadHistory(60.0), 107.5).rows
    assert len(rows) >= 3
    assert [row.time - 1e9 for row in rows] == pytest.approx([row.start for row in rows], abs=1e-3)
