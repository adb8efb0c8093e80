"""Interpolation of notebook variables into prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbengine.frontend.text.interpolate import interpolate


class Point:
    x = 3

    def __str__(self) -> str:
        return "a point"


NAMESPACE = {
    "name": "Ada",
    "n": 5,
    "p": Point(),
    "In": ["", "print(1)"],
    "Out": {1: "one"},
    "row": {"key": "value", "a b": "spaced"},
    "nested": SimpleNamespace(items=[{"k": [10, 20]}]),
    "évaluation": "unicode",
    "tricky": "{name} {{n}}",
    "json": json,
    "sorted": sorted,
    "Point": Point,
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello {name}!", "Hello Ada!"),
        ("{n}{n} {name}", "55 Ada"),
        ("{p} {p.x}", "a point 3"),
        ("{In[1]} -> {Out[1]}", "print(1) -> one"),
        ("{In[-1]}", "print(1)"),
        ("{row[\"key\"]} {row['a b']}", "value spaced"),
        ('{nested.items[0]["k"][1]}', "20"),
        ("{évaluation}", "unicode"),
        ("{{name}}", "{name}"),
        ("{{{name}}}", "{Ada}"),
        ("{{{{name}}}}", "{{name}}"),
        ('{"a": {n}}', '{"a": 5}'),
        ('{"a": {{n}}}', '{"a": {n}}'),
        ("{{n}", "{5"),
        ("{n}}", "5}"),
    ],
)
def test_a_resolvable_field_is_replaced(text: str, expected: str) -> None:
    assert interpolate(text, NAMESPACE) == expected


@pytest.mark.parametrize(
    "text",
    [
        "{unknown} {{unknown}} {{{unknown}}}",
        "{name.missing} {Out[7]} {In[99]} {n[0]} {row[0]}",
        '{"name": "Ada", "list": [1, 2], "o": {"n": 5}}',
        "{ name } {name } {name!r} {n:>5} {n+1} {p()} {sorted(name)}",
        "for (int i = 0; i < n; i++) { name(); }",
        "\\frac{1}{2} ${name:-x} #{}",
        "{} {{}} { } {0} {True} {None} {if} {p.class}",
        "{json} {sorted} {Point} {name.upper}",
        "{% for x in y %}{{ name }}{% endfor %}",
        "{name\n}",
    ],
)
def test_everything_else_stays_byte_for_byte(text: str) -> None:
    assert interpolate(text, NAMESPACE) == text


def test_substituted_text_is_not_expanded_again() -> None:
    assert interpolate("{tricky}", NAMESPACE) == "{name} {{n}}"
    assert interpolate("{a}{b}", {"a": "{b}", "b": "{a}"}) == "{b}{a}"


def test_an_attribute_that_fails_on_its_own_account_is_not_hidden() -> None:
    class Broken:
        @property
        def value(self) -> int:
            raise ZeroDivisionError("broken")

    with pytest.raises(ZeroDivisionError, match="broken"):
        interpolate("{b.value}", {"b": Broken()})


@given(st.text(alphabet=st.sampled_from(list("{}[]\"'.ab0 \n:$é_-")), max_size=60))
def test_text_without_resolvable_fields_comes_back_byte_for_byte(text: str) -> None:
    assert interpolate(text, {}) == text


@given(
    before=st.text(alphabet="xy \n[]\"':", max_size=10),
    after=st.text(alphabet="xy \n[]\"':", max_size=10),
    value=st.text(max_size=20),
)
def test_a_field_is_replaced_whatever_its_value_and_surroundings(before: str, after: str, value: str) -> None:
    assert interpolate(f"{before}{{v}}{after}", {"v": value}) == before + value + after


WORDS = st.text(alphabet="ab'.[]0 ", max_size=5)


@given(st.recursive(st.integers() | WORDS, lambda c: st.lists(c) | st.dictionaries(WORDS, c)))
def test_json_survives_even_where_its_words_are_variables(value: object) -> None:
    text = json.dumps(value)
    assert interpolate(text, {"a": "wrong", "b": "wrong", "ab": "wrong"}) == text


def test_a_long_run_of_braces_takes_linear_time() -> None:
    # Quadratic, it would outlast the test's time-out many times over.
    text = "{" * 1_000_000 + "}" * 1_000_000
    assert interpolate(text, NAMESPACE) == text
