"""StructuredOutputsParams: what is refused before a request is sent, and that the rest arrives."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec
import pydantic
import pytest

from nbengine import InvalidArgumentError, InvalidTypeError, SamplingParams, StructuredOutputsParams


class Address(pydantic.BaseModel):
    """A model as people write it."""

    street: str
    kind: Literal["home", "work"] = "home"


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({}, InvalidArgumentError, ["exactly one of json, regex, choice, grammar, json_object"]),
        (
            {"regex": "a", "json_object": True},
            InvalidArgumentError,
            ["exactly one", "'regex', 'json_object'"],
        ),
        ({"disable_any_whitespace": True}, InvalidArgumentError, ["exactly one"]),
        ({"json": "{"}, InvalidArgumentError, ["structured_outputs.json", "JSON schema", "'{'"]),
        ({"json": "[1]"}, InvalidArgumentError, ["structured_outputs.json", "JSON schema"]),
        ({"json": 5}, InvalidTypeError, ["structured_outputs.json", "5"]),
        ({"json": {"enum": {1, 2}}}, InvalidArgumentError, ["not JSON serializable"]),
        ({"json": {"minimum": float("nan")}}, InvalidArgumentError, ["structured_outputs.json", "nan"]),
        ({"json": '{"items":' * 2000}, InvalidArgumentError, ["structured_outputs.json", "recursion"]),
        ({"json": {"const": "\ud800"}}, InvalidArgumentError, ["structured_outputs.json", "surrogate pair"]),
        ({"regex": ""}, InvalidArgumentError, ["structured_outputs.regex", "not empty"]),
        ({"regex": 3}, InvalidTypeError, ["structured_outputs.regex", "a string"]),
        ({"regex": "\ud800"}, InvalidArgumentError, ["structured_outputs.regex", "UTF-8"]),
        ({"choice": []}, InvalidArgumentError, ["structured_outputs.choice", "none of them empty"]),
        ({"choice": ["a", ""]}, InvalidArgumentError, ["structured_outputs.choice", "none of them empty"]),
        ({"choice": "ab"}, InvalidTypeError, ["structured_outputs.choice", "a list of strings"]),
        ({"choice": ["a", 1]}, InvalidTypeError, ["structured_outputs.choice", "a list of strings"]),
        ({"choice": ["a\udfff"]}, InvalidArgumentError, ["structured_outputs.choice", "UTF-8"]),
        ({"grammar": ""}, InvalidArgumentError, ["structured_outputs.grammar", "not empty"]),
        ({"json_object": False}, InvalidTypeError, ["structured_outputs.json_object", "True"]),
        ({"json_object": True, "disable_any_whitespace": 1}, InvalidTypeError, ["disable_any_whitespace"]),
        ({"regex": "a", "whitespace_pattern": " "}, InvalidArgumentError, ["whitespace_pattern", "JSON"]),
        (
            {"json_object": True, "whitespace_pattern": "x", "disable_any_whitespace": True},
            InvalidArgumentError,
            ["whitespace_pattern"],
        ),
    ],
)
def test_the_message_names_the_field_and_what_is_allowed(
    fields: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        StructuredOutputsParams(**fields)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {"b": {}, "a": {"enum": [None, "ü", 1.5, True]}}}},
        {"json": '{"type": "integer"}', "whitespace_pattern": " ?"},
        {"regex": r"\d{3}"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "a"'},
        {"json_object": True, "disable_any_whitespace": True},
    ],
)
def test_it_arrives_as_it_was_given(fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**fields))
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert arrived == params.clone() == params
    assert arrived.structured_outputs is not None
    kind, value = next(iter(fields.items()))
    assert arrived.structured_outputs.constraint == (kind, value)
    if kind == "json" and isinstance(value, dict):
        assert list(arrived.structured_outputs.constraint[1]["properties"]) == ["b", "a"]


def test_a_pydantic_model_stands_for_its_schema() -> None:
    params = StructuredOutputsParams(json=Address)  # type: ignore[arg-type]
    assert params.json == Address.model_json_schema()
    assert params.json["required"] == ["street"]


def test_a_tuple_of_choices_is_a_list() -> None:
    params = StructuredOutputsParams(choice=("a", "b"))  # type: ignore[arg-type]
    assert params.choice == ["a", "b"]


def test_sampling_params_take_nothing_else_for_structured_outputs() -> None:
    with pytest.raises(InvalidTypeError, match="structured_outputs must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compiled", "text"),
    [
        (re.compile("ab"), "ab"),
        (re.compile("a.b", re.IGNORECASE | re.DOTALL), "(?is)a.b"),
        (re.compile("a b", re.VERBOSE), "(?x)a b"),
    ],
)
def test_a_compiled_regular_expression_is_its_text(compiled: re.Pattern[str], text: str) -> None:
    assert StructuredOutputsParams(regex=compiled).regex == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "regex",
    [
        r"\bab",
        r"(?=a)a",
        r"(a)\1",
        re.compile("^a$", re.MULTILINE),
        re.compile(b"a"),
        re.compile("a", re.ASCII),
    ],
)
def test_a_regular_expression_that_no_grammar_has_is_refused_before_it_is_sent(regex: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"structured_outputs\.regex"):
        StructuredOutputsParams(regex=regex)
