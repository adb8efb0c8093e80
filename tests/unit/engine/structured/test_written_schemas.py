"""Schemas as other libraries write them: what a grammar lets a model write fits the schema, as jsonschema judges, and
what fits can be written.

`tests/data/zod_schemas.json` is what `z.toJSONSchema` of zod 4.6.7 makes of each of its types.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
from tokenizers import Tokenizer

from nbengine.engine.core.structured import StructuredOutputManager
from nbengine.errors import RequestError
from nbengine.json_schemas import unenforced
from tests.support.thorough import amount
from tests.unit.engine.structured.grammar_rig import EOS, Make, allowed, encode, follows

ZOD = json.loads((Path(__file__).parents[3] / "data" / "zod_schemas.json").read_text(encoding="utf-8"))
NOT_KEPT = {
    "duration": "looks around",
    "emoji": "looks around",
    "hostname": "looks around",
    "jwt": "format 'jwt'",
}
"""The parts of what zod writes that a grammar cannot keep: each is named in a warning."""
SELDOM = ("float64", "startsWith")
"""The schemas that chance hardly ever meets: with a number that a float can hold, and with "abxc"."""
LONGEST = 300
CLOSING = '"}],:'
INNER = {"type": "integer"}

NAMES: dict[str, Any] = {
    "names of a pattern": {"propertyNames": {"pattern": "^x"}, "additionalProperties": INNER},
    "names of a length": {"propertyNames": {"minLength": 2, "maxLength": 3}, "additionalProperties": INNER},
    "names in a list": {"propertyNames": {"enum": ["a", "b", 3]}, "patternProperties": {"a": INNER}},
    "one name": {"propertyNames": {"const": "a"}, "properties": {"a": INNER, "b": {}}},
    "names beside properties": {
        "propertyNames": {"pattern": "^[ab]$"},
        "properties": {"a": INNER, "c": INNER},
    },
    "no other names": {
        "propertyNames": {"pattern": "^[ab]$"},
        "properties": {"a": INNER, "c": INNER},
        "additionalProperties": False,
    },
    "two rules for a name": {
        "propertyNames": {"enum": ["ab"]},
        "patternProperties": {"a": {"minimum": 3}, "b": INNER},
    },
}
KEPT = {name: schema for name, schema in ZOD.items() if name not in NOT_KEPT} | {
    name: {"type": "object", **schema} for name, schema in NAMES.items()
}


def walk(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer, schema: Any, chance: random.Random
) -> str | None:
    """Write a text as a model might that knows nothing but the grammar; None if it does not come to an end."""
    grammar = make({"max_tokens": LONGEST}, json=schema)
    closing = {EOS, *(encode(tokenizer, character)[0] for character in CLOSING)}
    written: list[int] = []
    for _ in range(LONGEST):
        choices = allowed(manager, grammar)
        ends = choices & closing
        token = chance.choice(sorted(ends if ends and chance.random() < 0.5 else choices))
        if token == EOS:
            return tokenizer.decode(written)
        assert grammar.accept_tokens([token])
        written.append(token)
    return None


@pytest.mark.parametrize("name", [name for name in KEPT if name not in SELDOM])
def test_what_can_be_written_fits(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer, name: str
) -> None:
    assert unenforced(KEPT[name]) == []
    validator = jsonschema.Draft202012Validator(KEPT[name])
    chance = random.Random(name)
    texts = [walk(manager, make, tokenizer, KEPT[name], chance) for _ in range(amount(8, thorough=300))]
    whole = [text for text in texts if text is not None]
    assert whole
    for text in whole:
        validator.validate(json.loads(text))


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_a_grammar_cannot_keep_is_named(make: Make, name: str) -> None:
    make(json=ZOD[name])
    assert NOT_KEPT[name] in "; ".join(unenforced(ZOD[name]))


FITTING: list[tuple[str, list[Any]]] = [
    ("record", [{}, {"a": 1, "b": 2.5}]),
    ("enumRecord", [{"a": 1, "b": 2}]),
    ("partialRecord", [{}, {"b": 2}]),
    ("never", [{}]),
    ("recursive", [{"value": 1, "children": [{"value": 2, "children": []}]}]),
    ("discriminated", [{"kind": "a", "x": 1}, {"kind": "b", "y": "z"}]),
    ("float64", [1.5e300, -3]),
    ("startsWith", ["abxc"]),
    ("tuple", [["a", 1.5]]),
    ("template", ["a12px"]),
    ("json", [{"a": [1, None, {"b": True}]}]),
    ("base64", ["", "YWJj"]),
    ("names of a pattern", [{}, {"x": 1, "xy": 2}]),
    ("names of a length", [{"ab": 1, "abc": 2}]),
    ("names in a list", [{"a": 1}, {"b": "anything"}]),
    ("one name", [{}, {"a": 1}]),
    ("names beside properties", [{"a": 1, "b": True}]),
    ("no other names", [{}, {"a": 1}]),
    ("two rules for a name", [{"ab": 3}]),
]
NOT_FITTING: list[tuple[str, list[Any]]] = [
    ("record", [{"a": "b"}, []]),
    ("enumRecord", [{"a": 1}, {"a": 1, "c": 2}]),
    ("partialRecord", [{"c": 1}]),
    ("never", [{"a": 1}]),
    ("discriminated", [{"kind": "a", "y": "z"}]),
    ("int32", [2147483648]),
    ("startsWith", ["abc", "xabc"]),
    ("names of a pattern", [{"y": 1}, {"x": "a"}]),
    ("names of a length", [{"a": 1}, {"abcd": 1}]),
    ("names in a list", [{"3": 1}, {"a": "no integer"}]),
    ("one name", [{"b": 1}]),
    ("names beside properties", [{"c": 1}, {"a": True}]),
    ("no other names", [{"b": 1}]),
    ("two rules for a name", [{"ab": 2}, {"ab": 3.5}]),
]


@pytest.mark.parametrize(
    ("name", "values", "fits"), [(*case, True) for case in FITTING] + [(*case, False) for case in NOT_FITTING]
)
def test_what_fits_can_be_written_and_nothing_else(
    manager: StructuredOutputManager,
    make: Make,
    tokenizer: Tokenizer,
    name: str,
    values: list[Any],
    fits: bool,
) -> None:
    validator = jsonschema.Draft202012Validator(KEPT[name])
    for value in values:
        assert validator.is_valid(value) is fits
        assert follows(manager, make(json=KEPT[name]), encode(tokenizer, json.dumps(value))) is fits, value


@pytest.mark.parametrize(
    ("schema", "named", "value"),
    [
        ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["maximum"], 12),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["minimum", "maximum"], -12),
        ({"type": "number", "exclusiveMaximum": 3.4e38}, ["exclusiveMaximum"], 1.5),
        ({"type": "number", "exclusiveMinimum": 5e-324}, ["exclusiveMinimum"], 1),
        ({"type": "number", "multipleOf": 1 / 3}, ["multipleOf"], 1),
        ({"type": "integer", "multipleOf": 2**40}, ["multipleOf"], 2**40),
        ({"type": "string", "maxLength": 2**40}, [], "a"),
        ({"type": "array", "maxItems": 2**64}, [], [1]),
    ],
)
def test_numbers_beyond_the_library_are_named_and_not_refused(
    manager: StructuredOutputManager,
    make: Make,
    tokenizer: Tokenizer,
    schema: dict[str, Any],
    named: list[str],
    value: Any,
) -> None:
    assert [what.split()[1] for what in unenforced(schema)] == named
    assert follows(manager, make(json=schema), encode(tokenizer, json.dumps(value)))


def test_any_bound_and_any_multiple_is_taken_or_named(make: Make) -> None:
    chance = random.Random(7)
    kept = 0
    for _ in range(amount(150, thorough=5000)):
        key = chance.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
        value: float = chance.choice([1, -1]) * chance.random() * 10.0 ** chance.randint(-60, 60)
        if chance.random() < 0.5:
            value = round(value, chance.randint(0, 9)) if chance.random() < 0.5 else round(value)
        if key == "multipleOf":
            value = abs(value) or 1
        schema = {"type": chance.choice(["number", "integer"]), key: value}
        make(json=schema)
        kept += not unenforced(schema)
    assert kept > 0


def test_a_name_that_no_rule_allows_is_refused(make: Make) -> None:
    schema = {"type": "object", "propertyNames": {"enum": ["a"]}, "required": ["b"]}
    with pytest.raises(RequestError, match="b"):
        make(json=schema)


@attrs.define
class Part:
    name: str
    size: float | None = None


@attrs.define
class Whole:
    parts: list[Part]
    names: dict[str, int] = attrs.field(factory=dict)


def test_a_class_of_attrs_is_its_schema(
    manager: StructuredOutputManager, make: Make, tokenizer: Tokenizer
) -> None:
    for text, fits in (
        ('{"parts": [{"name": "a", "size": null}]}', True),
        ('{"parts": [{"size": 1}]}', False),
    ):
        assert follows(manager, make(json=Whole), encode(tokenizer, text)) is fits
