"""JSON schemas as their usual writers write them: what is taken, what is left out, and what is named in a warning."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import typing
import warnings
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, SecretStr, TypeAdapter

from nbengine.engine.core.grammar_check import GrammarSource, _checked
from nbengine.errors import InvalidTypeError, UnenforcedSchemaWarning
from nbengine.grammar_schemas import LISTS, MAPS, ONE, for_grammar
from nbengine.json_schemas import parts_of, schema_of, unenforced, warn_of_unenforced
from nbengine.sampling_params import StructuredOutputsParams
from tests.support.thorough import amount


@dataclasses.dataclass
class Point:
    x: int
    name: str


class Colour(enum.Enum):
    RED = "red"


class Place(typing.TypedDict):
    name: str


class Record(msgspec.Struct):
    tags: set[str]


class Entry(BaseModel):
    where: Path
    secret: SecretStr
    data: bytes
    tags: set[str]


def checked(schema: dict[str, Any]) -> str:
    """The reason why the engine refuses a schema; empty if it does not."""
    source = GrammarSource("json", json.dumps(schema))
    return _checked(msgspec.json.encode(source)).error


@pytest.mark.parametrize(
    "given", [Point, Colour, Place, Record, list[int], dict[str, int], TypeAdapter(Point), Entry, int | None]
)
def test_classes_and_types_have_the_schema_that_their_library_writes(given: Any) -> None:
    params = StructuredOutputsParams(json=given)
    assert isinstance(params.json, dict)
    jsonschema.Draft202012Validator.check_schema(params.json)
    assert checked(params.json) == ""
    assert StructuredOutputsParams(json=json.dumps(params.json)).constraint[0] == "json"


def test_a_class_without_a_schema_is_refused_by_name() -> None:
    class Odd:
        pass

    with pytest.raises(InvalidTypeError, match=r"structured_outputs\.json must be a class that has a JSON"):
        StructuredOutputsParams(json=Odd)
    assert schema_of("{}") == "{}"


def test_a_schema_with_a_number_that_the_wire_cannot_carry_is_kept_as_text() -> None:
    schema = {"type": "integer", "maximum": 2**70}
    params = StructuredOutputsParams(json=schema)
    assert isinstance(params.json, str)
    assert json.loads(params.json) == schema
    assert msgspec.msgpack.encode(params)


def test_a_schema_may_have_tuples_and_numbers_of_numpy() -> None:
    params = StructuredOutputsParams(json={"enum": (np.int64(1), "a"), "required": ("x",)})
    assert params.json == {"enum": [1, "a"], "required": ["x"]}


UNKNOWN = (
    "path",
    "password",
    "binary",
    "base64",
    "uuid4",
    "ipv4network",
    "regex",
    "file-path",
    "nope",
    "int32",
)


@pytest.mark.parametrize("form", UNKNOWN)
def test_unknown_formats_are_annotations(form: str) -> None:
    schema = {"type": "string", "format": form, "maxLength": 3}
    assert checked(schema) == ""
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema))) != ""


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "format": "base64"}, ["#: format 'base64'"]),
        ({"type": "string", "format": "password"}, []),
        ({"type": "string", "format": "uuid"}, []),
        ({"type": "integer", "format": "int32"}, []),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, ["#/properties/a/items: uniqueItems"]),
        ({"uniqueItems": False}, []),
        ({"$defs": {"A": {"not": {"const": 1}}}}, ["#/$defs/A: not"]),
        ({"anyOf": [{"type": "null"}, {"if": {}, "then": {}}]}, ["#/anyOf/1: if"]),
        ({"unevaluatedProperties": False}, ["#: unevaluatedProperties"]),
        *(
            ({"pattern": pattern}, [f"#: pattern {pattern!r}, which looks around or back"])
            for pattern in (
                r"\bab\b",
                r"a\B",
                r"(?P<n>a)(?P=n)",
                r"(?<n>a)\k<n>",
                "(?>a)b",
                "(?im)^a$",
                "(?<!x)a",
            )
        ),
        *(
            ({"pattern": pattern}, [])
            for pattern in (
                r"\(?=a",
                "[(?=]a",
                r"[\b]a",
                r"a\Z",
                r"\cA",
                "(?#(?=x)a",
                "(?s:.)",
                r"\\b",
                "[]\\b]",
                "[a[b]]c",
            )
        ),
        ({"pattern": "^(?!x)a"}, ["#: pattern '^(?!x)a', which looks around or back"]),
        ({"patternProperties": {"(a)\\1": {}}}, ["#: pattern '(a)\\\\1', which looks around or back"]),
        ({"oneOf": [{"minLength": 1}, {"maxLength": 3}]}, ["#: oneOf, which is taken as anyOf"]),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, []),
        (
            {
                "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
                "$defs": {"A": {"type": "null"}, "B": {"type": "string"}},
            },
            [],
        ),
        ({"const": {"format": "nope", "not": 1}}, []),
        ({"propertyNames": {"pattern": "^a"}}, []),
        ({"propertyNames": {"pattern": "^a"}, "patternProperties": {"b": {}}}, ["#: propertyNames"]),
        ({"propertyNames": {"format": "uri"}}, ["#: propertyNames"]),
        ({"format": "nanoid", "pattern": "^[a-z]{21}$"}, []),
        (
            {"format": "nope", "allOf": [{"pattern": "(?=b)"}]},
            ["#: format 'nope'", "#/allOf/0: pattern '(?=b)', which looks around or back"],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
                "$defs": {"A": {"type": "integer"}, "B": {"type": "number"}},
            },
            ["#: oneOf, which is taken as anyOf"],
        ),
        (
            {
                "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
                "discriminator": {"propertyName": "kind"},
                "$defs": {
                    "A": {"properties": {"kind": {"const": "a"}}},
                    "B": {"properties": {"kind": {"const": "b"}}},
                },
            },
            [],
        ),
        ({"default": {"uniqueItems": True}, "examples": [{"not": {}}]}, []),
        ({"properties": {"not": {"type": "string"}, "format": {"type": "string"}}}, []),
    ],
)
def test_what_a_grammar_cannot_keep_is_named_with_its_path(schema: dict[str, Any], named: list[str]) -> None:
    assert unenforced(schema) == named
    assert checked(schema) == ""
    for form in (schema, json.dumps(schema)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_unenforced("structured_outputs.json", form)
        assert [warning.category for warning in caught] == [UnenforcedSchemaWarning] * bool(named)
        assert all(name in str(warning.message) for warning in caught for name in named)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        (r"^ab\Z", ["ab"], ["ab\n", "abc"]),
        (r"^\cA\cz[\cB]$", ["\x01\x1a\x02"], ["A"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^a(?#some (?= words)b$", ["ab"], ["a"]),
        (r"^[(?=]a$", ["(a", "=a"], ["a"]),
        (r"^\(?=a$", ["=a", "(=a"], ["a"]),
        (r"^\\b$", ["\\b"], ["b"]),
    ],
)
def test_what_python_and_javascript_write_in_patterns_is_kept(
    pattern: str, fitting: list[str], others: list[str]
) -> None:
    schema = for_grammar({"type": "string", "pattern": pattern, "patternProperties": {pattern: {}}})
    assert unenforced({"type": "string", "pattern": pattern}) == []
    assert schema["pattern"] in schema["patternProperties"]
    grammar = LLMatcher.grammar_from_regex(schema["pattern"])
    assert [text for text in (*fitting, *others) if accepts(grammar, text)] == fitting


def accepts(grammar: str, text: str) -> bool:
    """Return whether a grammar takes the whole of a text."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, grammar)
    return bool(matcher.consume_tokens(tokenizer.tokenize_str(text)) and matcher.is_accepting())


ODD = [
    None,
    True,
    -1,
    2.5,
    math.inf,
    -math.inf,
    10**400,
    5e-324,
    "a",
    "(",
    r"\p{L}",
    "(?=x)",
    [],
    [5],
    [[]],
    {"a": 5},
]
KEYWORDS = [
    *ONE,
    *LISTS,
    *MAPS,
    "format",
    "pattern",
    "required",
    "const",
    "enum",
    "type",
    "$ref",
    "discriminator",
]
KEYWORDS += ["multipleOf", "minimum", "maximum", "minLength", "maxLength", "maxItems"]
ODD_SCHEMAS = st.recursive(
    st.sampled_from(ODD),
    lambda inner: st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=5) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), ODD_SCHEMAS, max_size=5))
@settings(max_examples=amount(75, thorough=50_000), deadline=None)
def test_no_schema_breaks_the_walk_through_it(schema: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        # Python says of some patterns that they may mean something else one day.
        warnings.simplefilter("ignore", FutureWarning)
        assert all(what.startswith("#") for what in unenforced(schema))
        for_grammar(schema)


@pytest.mark.parametrize("number", [math.inf, 10**400])
def test_a_number_without_an_end_is_named(number: float) -> None:
    (named,) = unenforced({"multipleOf": number})
    assert named.startswith("#: multipleOf ")


def test_a_pattern_that_is_none_of_python_is_named_beside_properties() -> None:
    schema = {"type": "object", "propertyNames": {"pattern": r"^\p{L}+$"}, "properties": {"a": {}}}
    assert unenforced(schema) == ["#: propertyNames"]
    assert checked(schema) == ""
    assert unenforced({"type": "object", "propertyNames": {"pattern": r"^\p{L}+$"}}) == []


def test_what_the_library_keeps_is_not_named() -> None:
    kept = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "^a+$"}, "b": {"const": {"x": [1, None]}}},
        "patternProperties": {"^x": {"type": "number", "multipleOf": 0.5}},
        "required": ["a"],
        "minProperties": 1,
        "default": {},
        "$comment": "x",
    }
    assert unenforced(kept) == []
    assert for_grammar(kept) == kept
    assert LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(kept))) == ""


def test_a_contradiction_is_refused_with_its_path() -> None:
    wrong = {"type": "string", "minLength": 5, "maxLength": 2}
    schema = {"properties": {"a": {"items": {"$ref": "#/$defs/A"}}}, "$defs": {"A": {"anyOf": [{}, wrong]}}}
    assert checked(
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": wrong}, "required": ["b"]}
    ).startswith("#/properties/b: ")
    assert checked(wrong).startswith("Unsatisfiable")
    assert checked(schema) == ""  # another branch can be met
    assert [path for path, _ in parts_of(schema)][:3] == ["#", "#/$defs/A", "#/$defs/A/anyOf/0"]
