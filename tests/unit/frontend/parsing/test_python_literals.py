"""Literals of Python become the JSON of the values that Python itself reads."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.frontend.parsing.python_literals import json_of_literal

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_what_python_writes_is_read_back(value: object) -> None:
    written = json_of_literal(repr(value))
    assert written is not None
    assert json.loads(written) == value == ast.literal_eval(repr(value))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("null", None),
        ("(1, 2)", [1, 2]),
        ("(1)", 1),
        ("()", []),
        ("[1, ]", [1]),
        ("'a' \"b\"", "ab"),
        (r"'\d+\x41\u00e9\101\''", r"\d+AéA'"),
        ("{1: 'x'}", {"1": "x"}),
        (" .5 ", 0.5),
        ("-2e3", -2000.0),
    ],
)
def test_forms_that_models_write_are_read(text: str, value: object) -> None:
    written = json_of_literal(text)
    assert written is not None
    assert json.loads(written) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "f(1)",
        "1 2",
        "[1 2]",
        "{1}",
        "{[]: 1}",
        "'a",
        "1e999",
        "[",
        "{'a' 1}",
        "1a",
        "[" * 200,
        "9" * 5000,
    ],
)
def test_anything_else_is_no_literal(text: str) -> None:
    assert json_of_literal(text) is None
