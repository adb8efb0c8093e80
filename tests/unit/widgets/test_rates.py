"""Rates, against sums over all that has happened."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats, WorkerStats
from nbengine.metrics.trace import (
    BlocksCached,
    RequestAdded,
    RequestTrace,
    StepDone,
    StepPlanned,
    TraceBatch,
    TraceSnapshot,
)
from nbengine.widgets.following import rates as rates_module
from nbengine.widgets.following.rates import RateMeter
from tests.support.thorough import amount
from tests.unit.widgets.dashboards import START, SmallEngine


def gaps_of(engine: SmallEngine) -> list[float]:
    """Every time between two tokens of a request, from the steps alone."""
    last: dict[int, float] = {}
    gaps = []
    for step in engine.mirror.steps:
        done = step.time + (step.seconds or 0.0)
        for number in step.numbers:
            if number in last and number not in step.prefills:
                gaps.append(done - last[number])
            last[number] = done
    return gaps


@settings(max_examples=amount(12, thorough=800), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=15)
)
def test_figures_are_those_of_all_steps_and_requests(history: list[tuple[int, int, int]]) -> None:
    engine, meter = SmallEngine(num_blocks=40), RateMeter()
    meter.take({0: engine.mirror})
    for prompt, max_tokens, steps in history:
        engine.add(prompt, max_tokens)
        engine.run(steps)
        meter.take({0: engine.mirror})
    now = START + 4.0
    assert engine.time < now
    rates = meter.rates(EngineStats(), now)
    steps = list(engine.mirror.steps)
    assert rates.tokens_in_per_second == pytest.approx(sum(s.num_prefill_tokens for s in steps) / 4)
    assert rates.tokens_out_per_second == pytest.approx(sum(s.num_sampled for s in steps) / 4)
    views = [*engine.mirror.requests.values(), *engine.mirror.finished.values()]
    firsts = [v.first_token_at - v.added.time for v in views if v.first_token_at is not None]
    assert rates.time_to_first_token == (pytest.approx(statistics.median_low(firsts)) if firsts else None)
    for index, part in enumerate((95, 99)):
        # The least value that so great a part of them does not exceed.
        least = min(
            (v for v in firsts if 100 * sum(w <= v for w in firsts) >= part * len(firsts)), default=None
        )
        assert rates.first_token_tail[index] == (None if least is None else pytest.approx(least))
    gaps = gaps_of(engine)
    assert rates.inter_token_latency == (pytest.approx(statistics.median_low(gaps)) if gaps else None)


def test_nothing_is_known_before_anything_was_followed() -> None:
    engine, meter = SmallEngine(), RateMeter()
    assert meter.rates(EngineStats(), START).tokens_out_per_second is None
    meter.take({0: engine.mirror})
    assert meter.rates(EngineStats(), START + 0.1).tokens_out_per_second is None
    rates = meter.rates(EngineStats([SchedulerStats(0)]), START + 1.0)
    assert (rates.tokens_out_per_second, rates.tokens_in_per_second) == (0, 0)
    assert (rates.time_to_first_token, rates.inter_token_latency, rates.memory_bytes) == (None, None, None)


def test_what_lies_back_too_far_counts_no_more() -> None:
    engine, meter = SmallEngine(), RateMeter()
    meter.take({0: engine.mirror})
    engine.add(10, 5)
    engine.run(5)
    meter.take({0: engine.mirror})
    late = engine.time + rates_module.WINDOW
    rates = meter.rates(EngineStats(), late)
    assert (rates.tokens_out_per_second, rates.inter_token_latency) == (0, None)
    assert rates.time_to_first_token is not None
    late += rates_module.FIRST_TOKEN_WINDOW
    assert meter.rates(EngineStats(), late).time_to_first_token is None


def test_ranks_are_added_up_and_those_that_left_forgotten() -> None:
    engines = [SmallEngine(rank=rank) for rank in range(2)]
    meter, mirrors = RateMeter(), {rank: engine.mirror for rank, engine in enumerate(engines)}
    meter.take(mirrors)
    for engine in engines:
        engine.add(10, 5)
        engine.run(5)
    meter.take(mirrors)
    workers = [WorkerStats(0, 100), WorkerStats(1, 200)]
    stats = EngineStats([SchedulerStats(0, workers=workers), SchedulerStats(1, workers=workers[:1])])
    rates = meter.rates(stats, START + 2)
    assert rates.tokens_out_per_second == pytest.approx(5.0)
    assert rates.memory_bytes == 400
    meter.take({0: engines[0].mirror})
    assert meter.rates(stats, START + 2).tokens_out_per_second == pytest.approx(2.5)


class SteadyEngine:
    """One request that gets a token every 10 ms, whether it is followed or not."""

    def __init__(self) -> None:
        self.mirror = TraceMirror(0)
        self.time = START
        self._steps = 0
        self._stats = SchedulerStats(0, num_running_reqs=1, num_blocks=16, num_free_blocks=15)

    def begin_anew(self) -> None:
        """Let a snapshot come."""
        added = RequestAdded(0, "r", 0, START, 4, 100_000, [1])
        request = RequestTrace(added, True, 4 + self._steps, 1 + self._steps, 0, 0, [1])
        self.mirror.apply(
            TraceSnapshot(0, self._steps, self.time, 4, 64, 8, [request], BlocksCached([], []), self._stats)
        )

    def run(self, seconds: float, *, followed: bool = True) -> None:
        for _ in range(round(seconds * 100)):
            planned = StepPlanned(self._steps, self.time, [0], [1], [4 + self._steps], [], [])
            self._steps += 1
            self.time += 0.01
            events = [planned, StepDone(self._steps - 1, self.time, [1])]
            if followed:
                assert self.mirror.apply(TraceBatch(0, self._steps, self.time, events, self._stats))


@pytest.mark.parametrize("is_lost", [False, True], ids=["a new snapshot", "a new mirror"])
def test_after_a_pause_what_was_not_seen_is_not_taken_for_nothing(is_lost: bool) -> None:
    engine, meter = SteadyEngine(), RateMeter()

    def rate() -> float | None:
        meter.take({0: engine.mirror})
        return meter.rates(EngineStats(), engine.time).tokens_out_per_second

    engine.begin_anew()
    rate()
    engine.run(20.0)
    assert rate() == pytest.approx(100, rel=0.01)
    engine.run(1.0, followed=False)
    if is_lost:
        engine.mirror = TraceMirror(0)
    engine.begin_anew()
    assert rate() is None
    for seconds, expected in ((0.4, None), (0.2, 100.0), (1.0, 100.0), (10.0, 100.0)):
        engine.run(seconds)
        assert rate() == (expected and pytest.approx(expected, rel=0.01))
