"""JSON schemas as the grammar library can read them, and what is left out of them for it: patterns that look around,
numbers that its arithmetic cannot hold, and rules for the names of properties, of which most can be said another way.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from nbengine.errors import quoted

ONE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
"""Keywords whose value is a schema."""
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
"""Keywords whose value is a mapping of names, or patterns, to schemas."""
_TOKEN = re.compile(
    r"(?s)(?P<around>\(\?(?:[=!]|<[=!]|P=|>|[a-ln-z]*m)|\\[1-9bB]|\\k<)|\(\?#(?P<comment>[^)]*)\)|\\c(?P<control>[A-Za-z])"
    r"|(?P<end>\\Z)|(?P<opening>\[\^?\]?)|\\.|."
)
"""A part of a pattern outside of a class. No regular grammar has those `around`: look-around, back references, word
boundaries, atomic groups, lines."""
_TOKEN_IN_CLASS = re.compile(
    r"(?s)\\c(?P<control>[A-Za-z])|(?P<backspace>\\b)|(?P<opening>\[\^?\]?)|(?P<closing>\])|\\.|."
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("maxLength", "maxItems", "maxProperties")
_LARGEST_BOUND = 10**17
"""The library counts the digits of a bound in 64 bits."""
_SMALLEST_BOUND = 1e-50
"""The library writes a bound out, digit by digit."""
_LARGEST_COUNT = (1 << 32) - 1
_MOST_DIGITS = 9
"""Digits of `multipleOf`, which the library takes as a whole number of 32 bits and a power of ten."""
_LARGEST_FLOAT = sys.float_info.max
_ABOUT_NAMES = frozenset(
    (
        "$comment",
        "const",
        "description",
        "enum",
        "examples",
        "maxLength",
        "minLength",
        "pattern",
        "title",
        "type",
    )
)
"""Keywords of `propertyNames` that can be said with `properties` and `patternProperties`."""


def for_grammar(schema: Any) -> Any:
    """Return a copy of a schema in words that the grammar library can read, which allows the same but for what
    `left_out` names."""
    if not isinstance(schema, Mapping):
        return schema
    if schema.get("not") in ({}, True) and "not" in schema:
        # zod's `never`: the library leaves `not` out, and knows that nothing fits `false`.
        return False
    kept = {key: value for key, value in schema.items() if not _is_left_out(key, value)}
    if isinstance(named := kept.get("patternProperties"), Mapping):
        kept["patternProperties"] = {regular(key): own for key, own in named.items() if not looks_around(key)}
    if "pattern" in kept:
        kept["pattern"] = regular(kept["pattern"])
    kept |= {key: _mapped(key, kept[key]) for key in (*ONE, *LISTS, *MAPS) if key in kept}
    return _with_names(kept) if "propertyNames" in kept else kept


def left_out(schema: Mapping[str, Any]) -> Iterator[str]:
    """Name what `for_grammar` leaves out of a schema and answers may therefore break; schemas within it do not
    count."""
    for pattern in (schema.get("pattern"), *mapping_at(schema, "patternProperties")):
        if looks_around(pattern):
            yield f"pattern {quoted(pattern)}, which looks around or back"
    for key in (*_BOUNDS, "multipleOf"):
        value = schema.get(key)
        if _is_left_out(key, value) and not _holds_for_any_float(key, value):
            yield f"{key} {quoted(value)}, a number that no grammar can hold"
    if "propertyNames" in schema and not _can_be_said(schema):
        yield "propertyNames"


def mapping_at(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping at a keyword; empty where there is something else, which the grammar library refuses."""
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def list_at(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at a keyword; empty where there is something else, which the grammar library refuses."""
    value = schema.get(key)
    return value if isinstance(value, list) else []


def looks_around(pattern: object) -> bool:
    """Return whether a pattern has parts that no regular grammar has."""
    return isinstance(pattern, str) and any(
        token["around"] for _, token in _tokens(pattern) if token.re is _TOKEN
    )


def regular(pattern: Any) -> Any:
    """Return a pattern of Python or JavaScript in the words of the grammar library, which allow the same: it does not
    know the end of a text as Python writes it, control characters by their letters, and comments."""
    if not isinstance(pattern, str):
        return pattern
    return "".join(_regular_token(token) for _, token in _tokens(pattern))


def _tokens(pattern: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Take a pattern apart: each part with the number of classes that it is in."""
    depth = place = 0
    while token := (_TOKEN_IN_CLASS if depth else _TOKEN).match(pattern, place):
        yield depth, token
        place = token.end()
        if token["opening"]:
            depth += 1
        elif depth and token["closing"]:
            depth -= 1


def _regular_token(token: re.Match[str]) -> str:
    if token["control"]:
        return f"\\x{ord(token['control']) % 32:02x}"
    if token.re is _TOKEN_IN_CLASS:
        return r"\x08" if token["backspace"] else token[0]
    if token["comment"] is not None:
        return ""
    return r"\z" if token["end"] else token[0]


def _mapped(key: str, value: object) -> object:
    if isinstance(value, list) and key in LISTS:
        return [for_grammar(item) for item in value]
    if isinstance(value, Mapping) and key in MAPS:
        return {name: for_grammar(item) for name, item in value.items()}
    return for_grammar(value)


def _is_left_out(key: str, value: object) -> bool:
    if key == "pattern":
        return looks_around(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if key in _BOUNDS:
        return abs(value) > _LARGEST_BOUND or 0 < abs(value) < _SMALLEST_BOUND
    if key in _COUNTS:
        return value > _LARGEST_COUNT
    return key == "multipleOf" and value > 0 and not _has_few_digits(value)


def _has_few_digits(value: float) -> bool:
    """Return whether the library can take a number apart as it does: by tens, in floating point."""
    if value > _LARGEST_COUNT or len(Decimal(repr(value)).normalize().as_tuple().digits) > _MOST_DIGITS:
        return False
    scaled = float(value)
    while scaled % 1:
        scaled *= 10
    return scaled <= _LARGEST_COUNT


def _holds_for_any_float(key: str, value: Any) -> bool:
    if key == "maximum":
        return bool(value >= _LARGEST_FLOAT)
    return key == "minimum" and bool(value <= -_LARGEST_FLOAT)


# The names of properties.


def _can_be_said(schema: Mapping[str, Any]) -> bool:
    rule = schema["propertyNames"]
    if rule is True:
        return True
    if (
        not isinstance(rule, Mapping)
        or not set(rule) <= _ABOUT_NAMES
        or rule.get("type", "string") != "string"
    ):
        return False
    rules = [key for key in ("const", "enum", "pattern") if key in rule]
    rules += ["length"] * ("minLength" in rule or "maxLength" in rule)
    if not rules:
        return True
    if rules in (["const"], ["enum"]):
        return isinstance(rule.get("enum", []), list) and all(
            map(_can_be_searched, mapping_at(schema, "patternProperties"))
        )
    # A pattern counts for the properties that are listed, too, of which `additionalProperties` says nothing.
    is_free = not schema.get("properties") or schema.get("additionalProperties") in (None, {}, True, False)
    if not is_free or "patternProperties" in schema or len(rules) > 1 or looks_around(rule.get("pattern")):
        return False
    lengths = [rule[key] for key in ("minLength", "maxLength") if key in rule]
    if not all(isinstance(length, int) and 0 <= length <= _LARGEST_COUNT for length in lengths):
        return False
    pattern = rule.get("pattern", "")
    return isinstance(pattern, str) and (not schema.get("properties") or _can_be_searched(pattern))


def _can_be_searched(pattern: object) -> bool:
    """Return whether a pattern, which may be one of JavaScript, is one of Python, too."""
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (TypeError, re.error):
        return False
    return True


def _with_names(schema: dict[str, Any]) -> dict[str, Any]:
    """Say `propertyNames` with `properties`, `patternProperties` and `additionalProperties`, if that can be said."""
    if not _can_be_said(schema):
        return schema
    rule = schema.pop("propertyNames")
    if rule is True or not {"const", "enum", "pattern", "minLength", "maxLength"} & set(rule):
        return schema
    listed = mapping_at(schema, "properties")
    others = schema.get("additionalProperties", {})
    if "const" in rule or "enum" in rule:
        names = [rule["const"]] if "const" in rule else rule["enum"]
        allowed = {name: _schema_of_name(schema, name, others) for name in names if isinstance(name, str)}
        return {
            **{key: value for key, value in schema.items() if key != "patternProperties"},
            "properties": {name: own for name, own in allowed.items() if own is not False},
            "additionalProperties": False,
        }
    pattern = rule.get("pattern") or f"^(?s:.{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}})$"
    fitting = {name: own for name, own in listed.items() if re.search(pattern, name)}
    patterns = {} if others is False else {"patternProperties": {pattern: others}}
    return {**schema, "properties": fitting, **patterns, "additionalProperties": False}


def _schema_of_name(schema: Mapping[str, Any], name: str, others: Any) -> Any:
    """Return the schema of the property `name`; `others`: that of the names of which nothing else is said."""
    listed = mapping_at(schema, "properties")
    own = [listed[name]] if name in listed else []
    patterns = mapping_at(schema, "patternProperties")
    own += [value for key, value in patterns.items() if re.search(key, name)]
    if not own:
        return others
    return own[0] if len(own) == 1 else {"allOf": own}


def distinct_members(members: list[Any], whole: Any) -> bool:
    """Return whether no value can fit two of these schemas, as far as that is seen at once: they are of different
    types, or have constants or a property that tells them apart. References are looked up in `whole`."""
    found = [_resolved(member, whole) for member in members]
    if len(found) < 2 or not all(isinstance(member, Mapping) for member in found):
        return len(found) < 2
    kinds = [member.get("type") for member in found]
    if all(isinstance(kind, str) for kind in kinds) and len(set(kinds)) == len(kinds):
        return not {"integer", "number"} <= set(kinds)
    constants = [_constants(member) for member in found]
    if None not in constants:
        return _are_disjoint(constants)
    return any(_tells_apart(found, name) for name in list_at(found[0], "required"))


def _resolved(member: Any, whole: Any) -> Any:
    """Follow a schema's reference within the whole, if it has one and nothing else that counts."""
    reference = member.get("$ref") if isinstance(member, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return member
    found = whole
    for name in reference[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return member
        found = found[name]
    return found


def _constants(schema: Any) -> list[Any] | None:
    """Return the values that a schema allows; None if it does not list them."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    listed = schema.get("enum")
    return listed if isinstance(listed, list) else None


def _are_disjoint(groups: list[Any]) -> bool:
    texts = [{json.dumps(value, sort_keys=True, default=repr) for value in group} for group in groups]
    return sum(map(len, texts)) == len(set().union(*texts))


def _tells_apart(members: list[Any], name: str) -> bool:
    """Return whether a property that all members must have has values in each that no other one allows."""
    if not all(name in list_at(member, "required") for member in members):
        return False
    values = [_constants(mapping_at(member, "properties").get(name)) for member in members]
    return None not in values and _are_disjoint(values)
