"""Means of scores and their intervals, against published values and scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from nbengine.magics.scores.intervals import (
    CONFIDENCE,
    Estimate,
    of_differences_of_truths,
    of_numbers,
    of_truths,
    student_quantile,
)
from nbengine.magics.scores.summary import difference, estimate

GROUPS = st.lists(st.lists(st.floats(-1e6, 1e6), max_size=4), max_size=12)


def ends(estimate: Estimate) -> tuple[float, float]:
    assert estimate.low is not None
    assert estimate.high is not None
    return estimate.low, estimate.high


@pytest.mark.parametrize(
    ("num_true", "n", "low", "high"),
    # Newcombe, Two-sided confidence intervals for the single proportion (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_shares_have_the_intervals_that_newcombe_has_published(
    num_true: int, n: int, low: float, high: float
) -> None:
    found = of_truths(num_true, n)
    assert ends(found) == pytest.approx((low, high), abs=5e-5)
    assert (found.mean, found.n) == (num_true / n, n)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_shares_have_scipys_wilson_intervals(counts: tuple[int, int]) -> None:
    wilson = stats.binomtest(*counts).proportion_ci(CONFIDENCE, method="wilson")
    found = of_truths(*counts)
    assert ends(found) == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    assert found.mean is not None
    assert 0 <= ends(found)[0] <= found.mean <= ends(found)[1] <= 1


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=40))
def test_numbers_have_scipys_student_intervals(values: list[float]) -> None:
    found, n = of_numbers(values), len(values)
    half = stats.t.ppf(0.5 + CONFIDENCE / 2, n - 1) * float(np.std(values, ddof=1)) / math.sqrt(n)
    mean = math.fsum(values) / n
    assert ends(found) == pytest.approx((mean - half, mean + half), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("degrees", [*range(1, 60), 99, 100, 255, 1000, 9999])
def test_the_quantiles_are_scipys(degrees: int) -> None:
    assert student_quantile(degrees) == pytest.approx(stats.t.ppf(0.5 + CONFIDENCE / 2, degrees), rel=1e-10)


def test_paired_shares_have_the_published_interval() -> None:
    # Fagerland, Lydersen and Laake, Recommended tests and confidence intervals for paired binomial proportions
    # (2014): 21 children before and after a transplantation, 1 and 7 of whom changed.
    found = of_differences_of_truths(1, 7, 21)
    assert ends(found) == pytest.approx((-0.508, -0.013), abs=5e-4)
    assert found.mean == pytest.approx(-6 / 21)


@given(
    st.integers(1, 300).flatmap(
        lambda n: st.tuples(st.integers(0, n), st.just(n)).flatmap(
            lambda found: st.tuples(st.just(found[0]), st.integers(0, n - found[0]), st.just(n))
        )
    )
)
def test_differences_of_shares_lie_in_their_intervals_and_turn_with_their_sign(
    counts: tuple[int, int, int],
) -> None:
    gained, lost, n = counts
    found, turned = of_differences_of_truths(gained, lost, n), of_differences_of_truths(lost, gained, n)
    assert found.mean == (gained - lost) / n
    assert -1 <= ends(found)[0] <= found.mean <= ends(found)[1] <= 1
    assert ends(turned) == pytest.approx((-ends(found)[1], -ends(found)[0]))


def test_too_few_values_have_no_interval() -> None:
    nothing = Estimate(None, None, None, 0)
    assert of_truths(0, 0) == of_numbers([]) == of_differences_of_truths(0, 0, 0) == nothing
    assert of_numbers([3]) == Estimate(3.0, None, None, 1)
    assert of_numbers([2, 2, 2]) == Estimate(2.0, 2.0, 2.0, 3)


def test_huge_numbers_have_a_mean() -> None:
    assert of_numbers([1e308, 1e308]).mean == 1e308


@given(GROUPS)
def test_answers_of_one_prompt_count_once_where_there_are_several_prompts(groups: list[list[float]]) -> None:
    known = [group for group in groups if group]
    found = estimate(groups, is_truth=False)
    if len(known) <= 1:
        assert found == of_numbers([value for group in known for value in group])
    else:
        assert found.n == len(known)
        assert found.mean == pytest.approx(
            math.fsum(math.fsum(group) / len(group) for group in known) / len(known), abs=1e-6
        )


@given(GROUPS)
def test_a_constant_gain_is_certain_however_hard_the_prompts_are(groups: list[list[float]]) -> None:
    better: Sequence[Sequence[float]] = [[value + 0.5 for value in group] for group in groups]
    found = difference(groups, better, is_truth=False)
    assert found.n == sum(map(bool, groups))
    if found.n > 1:
        assert ends(found) == pytest.approx((0.5, 0.5), abs=1e-6)


def test_truth_values_of_single_answers_are_counted_and_others_averaged() -> None:
    first, second = [[True], [False], [False], []], [[True], [True], [True], [True]]
    assert difference(first, second, is_truth=True) == of_differences_of_truths(2, 0, 3)
    assert estimate(second, is_truth=True) == of_truths(4, 4)
    several = [[True, False], [True, True]]
    assert estimate(several, is_truth=True) == of_numbers([0.5, 1.0])
    assert difference(several, several, is_truth=True) == of_numbers([0.0, 0.0])
