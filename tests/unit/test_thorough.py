"""A quick run leaves out combinations, and no value."""

from __future__ import annotations

import itertools

import pytest

from tests.support import thorough
from tests.support.thorough import amount, combinations, in_turn, some

LISTS = (range(2), range(4), range(3), range(5))


@pytest.fixture(params=[False, True], ids=["quick", "thorough"])
def is_thorough(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(thorough, "THOROUGH", request.param)
    return bool(request.param)


def test_the_amount_is_that_of_the_run(is_thorough: bool) -> None:
    assert amount(1, thorough=2) == 1 + is_thorough


@pytest.mark.parametrize("ordinary", [1, 2, 3, 9, 10, 30])
def test_some_values_are_the_ends_and_what_lies_evenly_between(is_thorough: bool, ordinary: int) -> None:
    found = some((number for number in range(10)), ordinary=ordinary)
    assert len(found) == (10 if is_thorough else min(ordinary, 10))
    assert found == sorted(set(found))
    assert found[0] == 0
    assert found[-1] == 9 or len(found) == 1
    gaps = {after - before for before, after in itertools.pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("together", [1, 2, 3])
def test_so_many_values_meet_as_are_asked_for(is_thorough: bool, together: int) -> None:
    found = combinations(*LISTS, together=together)
    assert len(set(found)) == len(found)
    for axes in itertools.combinations(range(len(LISTS)), together):
        expected = set(itertools.product(*(LISTS[axis] for axis in axes)))
        assert {tuple(each[axis] for axis in axes) for each in found} == expected


def test_each_value_of_the_first_list_has_the_others_in_turn(is_thorough: bool) -> None:
    found = in_turn("abcd", range(2), "xy")
    assert found[:4] == (
        [("a", 0, "x"), ("a", 0, "y"), ("a", 1, "x"), ("a", 1, "y")]
        if is_thorough
        else [("a", 0, "x"), ("b", 0, "y"), ("c", 1, "x"), ("d", 1, "y")]
    )
    assert len(found) == (16 if is_thorough else 4)
    assert {each[1:] for each in found} == set(itertools.product(range(2), "xy"))


def test_a_quick_run_has_few_and_a_thorough_one_all(is_thorough: bool) -> None:
    sizes = [len(combinations(*LISTS, together=together)) for together in (1, 2, 3, 4)]
    assert sizes[-1] == 120
    if is_thorough:
        assert sizes == [120] * 4
    else:
        assert sizes[0] == 5
        assert 20 <= sizes[1] <= 26
        assert 60 <= sizes[2] < 90
