"""The types of tools' parameters, and values that models have written without saying their type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from nbengine.frontend.parsing.json_text import UNREADABLE, kind_of, quoted
from nbengine.frontend.parsing.python_literals import json_of_literal

ToolSchema = Mapping[str, Any]
Types = frozenset[str]
STRING: Types = frozenset({"string"})
UNKNOWN: Types = frozenset()
_MOST_REFERENCES = 8
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ToolTypes:
    """The names of tools and the types that their parameters may have."""

    def __init__(self, tools: Sequence[ToolSchema] = ()) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def may_be_called(self, name: str) -> bool:
        """Tell whether there is a tool of that name; without any tools, each name may be one."""
        return not self._parameters or name in self._parameters

    def of(self, tool: str, parameter: str) -> Types:
        """Return the types that a parameter may have, by the names of JSON schemas; none if that is not
        known."""
        root = self._parameters.get(tool, {})
        properties = root.get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return types_of(schema, root)


def types_of(schema: object, root: Mapping[str, Any], depth: int = 0) -> Types:
    """Return the types that a schema allows, none if it does not say; `root` has the definitions that it may
    refer to."""
    if not isinstance(schema, Mapping) or depth > _MOST_REFERENCES:
        return UNKNOWN
    found = _own_types(schema, root, depth)
    return found | {"null"} if found and schema.get("nullable") is True else found


def _own_types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Types:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind_or_nothing, schema["enum"])) - {""}
    if "const" in schema:
        return frozenset({_kind_or_nothing(schema["const"])}) - {""}
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(resolved(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        members = schema.get(key)
        if isinstance(members, list) and members:
            several = [types_of(member, root, depth + 1) for member in members]
            # A member that does not say its type may allow all of them.
            return frozenset().union(*several) if all(several) else UNKNOWN
    return UNKNOWN


def resolved(reference: str, root: Mapping[str, Any]) -> object:
    """Return what a reference within a schema, such as "#/$defs/Place", refers to; None if it is not there."""
    place: object = root
    if not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/"):
        place = place.get(part) if isinstance(place, Mapping) else None
    return place


def json_of(text: str, types: Types) -> str:
    """Write a value as JSON that a model has written as plain text.

    A text that is no value of these types becomes a string: then the tool can say what is wrong.
    """
    stripped = text.strip()
    candidate = _PYTHON_WORDS.get(stripped, stripped)
    kind = _kind_of_text(candidate)
    if kind and _fits(kind, types, candidate):
        return candidate
    if "string" not in types and stripped[:1] in "{[" and types & {"object", "array"}:
        return json_of_literal(stripped) or quoted(text)
    return quoted(text)


def _kind_of_text(text: str) -> str:
    try:
        return kind_of(msgspec.json.decode(text))
    except UNREADABLE:
        return ""


def _fits(kind: str, types: Types, text: str) -> bool:
    if not types:
        return True
    if kind == "string":
        # The quotes belong to a string that is written as it is.
        return False
    if kind in types or (kind == "integer" and "number" in types):
        return True
    return kind == "number" and "integer" in types and float(text).is_integer()


def _kind_or_nothing(value: object) -> str:
    try:
        return kind_of(value)
    except KeyError:
        return ""
