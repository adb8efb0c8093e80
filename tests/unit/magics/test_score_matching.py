"""Answers are compared with expected values: as they stand, normalised, by patterns, by fields of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.errors import InvalidArgumentError
from nbengine.magics.scores import matching
from nbengine.magics.scores.matching import contains, matcher_of, normalised

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("match", "expected", "answer", "is_equal"),
    [
        ("exact", "Paris", "Paris", True),
        ("exact", "Paris", "Paris.", False),
        ("exact", "Paris", " Paris", False),
        ("exact", 42, "42", True),
        ("exact", np.int64(42), "42", True),
        ("normalised", "Paris", ' **"PARIS."** \n', True),
        ("normalised", "New  York", "new\nyork!", True),
        ("normalised", "ﬁne", "Fine", True),
        ("normalised", "-5", "5", False),
        ("normalised", ".5", "5", False),
        ("normalised", "Paris", "It is Paris", False),
        ("regex", r"\bPar[iy]s\b", "It is Paris.", True),
        ("regex", r"^Paris$", "It is Paris.", False),
        ("json", {"city": "Paris"}, '{"city": "Paris", "country": "France"}', True),
        ("json", '{"city": "Paris"}', '```json\n{"city": "Paris"}\n```', True),
        ("json", {"city": "Paris"}, '{"city": "paris"}', False),
        ("json", {"city": "Paris"}, "Paris", False),
        ("json", {"city": "Paris"}, '["city"]', False),
        ("json", {"n": 1}, '{"n": true}', False),
        ("json", {"n": 1}, '{"n": 1.0}', True),
        ("json", {"a": {"b": [1, {"c": 2}]}}, '{"a": {"b": [1, {"c": 2, "d": 3}], "x": 0}}', True),
        ("json", {"a": [1]}, '{"a": [1, 2]}', False),
        ("json", {"a": 1}, "[" * 100_000, False),
    ],
)
def test_an_answer_is_what_is_expected_or_not(match: str, expected: Any, answer: str, is_equal: bool) -> None:
    assert matcher_of(match, expected)(answer) is is_equal


@pytest.mark.parametrize(
    ("match", "expected", "allowed"),
    [
        ("regex", "(", "a regular expression"),
        ("regex", "a{99999999999}", "a regular expression"),
        ("json", "Paris", "a dict of fields, or JSON of an object"),
        ("json", "[1]", "a dict of fields"),
        ("json", 3, "a dict of fields"),
        ("exact", None, "this row has none"),
        ("normalised", math.nan, "this row has none"),
        ("exact", np.float64("nan"), "this row has none"),
    ],
)
def test_an_expected_value_that_is_not_possible_is_refused(match: str, expected: Any, allowed: str) -> None:
    with pytest.raises(InvalidArgumentError, match=allowed):
        matcher_of(match, expected)


@given(st.text(st.characters(codec="ascii")))
def test_normalised_texts_know_neither_case_nor_white_space(text: str) -> None:
    assert normalised(text) == normalised(f"  {text.upper()}\t") == normalised(normalised(text))


@given(JSON, JSON)
def test_json_has_its_own_fields_and_keeps_them_with_others_added(value: Any, other: Any) -> None:
    assert contains(value, value)
    assert contains(json.loads(json.dumps(value)), value)
    if isinstance(value, dict):
        assert contains({**value, "another": other}, value)
        assert not contains(value, {**value, "another": other})


def test_a_pattern_that_takes_longer_than_anybody_waits_is_the_error_of_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching, "_SEARCH_SECONDS", 0.01)
    matches = matcher_of("regex", "(a|aa)+$")
    assert matches("caa")
    with pytest.raises(InvalidArgumentError, match=r"a regular expression that is looked for within 0.01 s"):
        matches("a" * 60 + "b")
