"""Histograms count every value once, and two states of one subtract to what came between them."""

from __future__ import annotations

import bisect

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbengine.ipc.messages import FinishReason
from nbengine.metrics.histograms import SECONDS, TOKENS, Seconds, Tokens
from nbengine.metrics.requests import FINISHED_REASONS, RequestStats, added_up
from tests.support.thorough import amount

VALUES = st.lists(st.floats(0, 4000) | st.sampled_from(SECONDS), max_size=30)


def histogram(values: list[float]) -> Seconds:
    made = Seconds()
    for value in values:
        made.observe(value)
    return made


@pytest.mark.parametrize("bounds", [SECONDS, TOKENS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


@given(VALUES)
def test_a_bound_counts_the_values_that_do_not_exceed_it(values: list[float]) -> None:
    made = histogram(values)
    expected = [sum(value <= bound for value in values) for bound in SECONDS]
    assert made.cumulated() == [*expected, len(values)]
    assert made.count == len(values)
    assert made.total == pytest.approx(sum(values))


@given(VALUES, VALUES)
def test_a_later_state_less_an_earlier_one_is_what_came_between(
    first: list[float], then: list[float]
) -> None:
    made = histogram(first)
    earlier = made.copy()
    for value in then:
        made.observe(value)
    between = made.minus(earlier)
    assert between.cumulated() == histogram(then).cumulated()
    assert between.total == pytest.approx(sum(then), abs=1e-6)
    assert earlier.cumulated() == histogram(first).cumulated(), "a copy stays as it is"
    assert earlier.plus(between).cumulated() == made.cumulated()


@settings(max_examples=amount(15, thorough=1000))
@given(st.lists(st.floats(0, 1800), min_size=1, max_size=30), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    found = histogram(values).quantile(share)
    below = sorted(values)
    true = below[max(0, min(len(below) - 1, -int(-share * len(below) // 1) - 1))]
    index = bisect.bisect_left(SECONDS, true)
    assert found is not None
    assert (SECONDS[index - 1] if index else 0) <= found <= SECONDS[index]


def test_quantiles_interpolate_within_a_bucket_and_end_at_the_last_bound() -> None:
    made = Seconds()
    made.observe(0.25, times=4)
    assert made.quantile(0.5) == pytest.approx(0.25)
    assert made.quantile(0.75) == pytest.approx(0.275)
    made.observe(1e6, times=96)
    assert made.quantile(0.99) == SECONDS[-1]
    assert (Seconds().quantile(0.5), Seconds().mean) == (None, None)


def test_a_value_counts_as_often_as_it_is_said_to() -> None:
    made = Tokens()
    made.observe(3, times=5)
    assert (made.count, made.total, made.mean) == (5, 15, 3)


def test_the_reasons_have_the_order_of_the_wire() -> None:
    assert [str(reason) for reason in FinishReason] == list(FINISHED_REASONS)
    assert [int(reason) for reason in FinishReason] == list(range(len(FINISHED_REASONS)))


def stats(num: int) -> RequestStats:
    made = RequestStats()
    for index in range(num):
        made.finished[index % 4] += 1
        for name, part in made.histograms().items():
            part.observe(index + len(name))
    return made


def test_figures_survive_the_wire_and_a_copy_is_of_its_own() -> None:
    made = stats(9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=RequestStats) == made
    other = made.copy()
    assert other == made
    other.finished[0] += 1
    other.queue_time.observe(1)
    assert made == stats(9)


def test_engine_cores_add_up_and_one_that_has_told_nothing_counts_nothing() -> None:
    both = added_up([stats(3), None, stats(5)])
    assert both.num_finished == 8
    assert all(part.count == 8 for part in both.histograms().values())
    assert added_up([]) == RequestStats()


def test_figures_since_an_earlier_state_and_since_a_new_start() -> None:
    later = stats(9).since(stats(4))
    assert later.num_finished == 5
    assert later.finished == [2, 1, 1, 1]
    assert all(part.count == 5 for part in later.histograms().values())
    assert stats(3).since(stats(4)) == stats(3), "an engine core that was started again counts from 0"
