"""JSON in a text that arrives in pieces: the end of an object, and checks."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
UNREADABLE = (msgspec.DecodeError, UnicodeError, RecursionError)
"""Errors that `msgspec.json.decode` raises about a text."""


class ObjectEnd:
    """A scanner that finds the end of a JSON object or list; it counts brackets and skips strings."""

    __slots__ = ("_depth", "_in_string", "_is_escaped")

    def __init__(self, depth: int = 0) -> None:
        """Begin in front of the object, or behind `depth` open brackets."""
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def find(self, text: str, start: int) -> int:
        """Read on from `start`; return the place behind the last bracket, -1 if it has not come."""
        place = start + self._is_escaped if start < len(text) else start
        if place > start:
            self._is_escaped = False
        while True:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if match is None:
                return -1
            place = match.end()
            found = match[0]
            if found == "\\":
                if place == len(text):
                    self._is_escaped = True
                    return -1
                place += 1
            elif found == '"':
                self._in_string = not self._in_string
            elif found in "{[":
                self._depth += 1
            else:
                self._depth -= 1
                if self._depth <= 0:
                    return place


def read_object(text: str) -> dict[str, Any] | str:
    """Return the JSON object that a text is, or the reason why it is none."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        return "it is nested too deeply"
    except UNREADABLE as error:
        return f"it is not JSON: {error}"
    if not isinstance(value, dict):
        return f"it is {kind_of(value)}, not an object"
    return value


def kind_of(value: object) -> str:
    """Name the type of a JSON value as JSON schemas do."""
    return _KINDS[type(value)]


_KINDS: dict[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}


def quoted(text: str) -> str:
    """Write a string as JSON."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Write what stands between the quotes of a JSON string; pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
