"""JSON in a text that arrives in pieces: the end of an object, and checks."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_SPACE = re.compile(r"[ \t\n\r]*")
_HEX = "[0-9a-fA-F]"
_HIGH = f"u[dD][89abAB]{_HEX}{{2}}"
_CHARACTERS = re.compile(
    rf'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|{_HIGH}\\u[dD][c-fC-F]{_HEX}{{2}}))*'
)
"""The characters and escapes in a string, in which the halves of a surrogate pair stand together."""
_ESCAPE_BEGUN = re.compile(rf"\\(?:u{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u{_HEX}{{0,3}})?)?)?")
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")
_WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.(?:[0-9]+(?:[eE][-+]?[0-9]*)?)?|[eE][-+]?[0-9]*)?)?")
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


class ObjectPrefix:
    """A checker of a text that arrives in pieces: may it still become a JSON object?"""

    __slots__ = ("_begun", "_closing", "_in_string", "_wanted")

    def __init__(self) -> None:
        self._begun = ""
        """The beginning of a number, a word or an escape, which is not checked to its end."""
        self._in_string = False
        self._wanted = "{"
        """The characters that may come next; V stands for a value, and K for a key."""
        self._closing: list[str] = []
        """The brackets that are still to come, the next one last."""

    def take(self, text: str) -> bool:
        """Take in the next piece; return False if the text is the beginning of no object.

        Nothing may follow that.
        """
        text, place = self._begun + text, 0
        self._begun = ""
        while place < len(text):
            if not self._in_string:
                place = _end_of(_SPACE, text, place)
                if place == len(text):
                    break
            end = self._string(text, place) if self._in_string else self._token(text, place)
            if end < 0:
                return False
            place = end
        return True

    def _string(self, text: str, place: int) -> int:
        """Read on in a string; return the place behind what is read, -1 if it is wrong."""
        place = _end_of(_CHARACTERS, text, place)
        if text[place : place + 1] == '"':
            self._in_string = False
            return place + 1
        if place < len(text) and _ESCAPE_BEGUN.fullmatch(text, place) is None:
            return -1
        self._begun = text[place:]
        return len(text)

    def _token(self, text: str, place: int) -> int:
        """Read a bracket, a sign, a quote, or a value that is no string; return as `_string` does."""
        found, wanted = text[place], self._wanted
        if found in "{}[]:," and (found in wanted or ("V" in wanted and found in "{[")):
            self._sign(found)
            return place + 1
        if found == '"' and ("K" in wanted or "V" in wanted):
            self._in_string = True
            self._wanted = ":" if "K" in wanted else self._behind_value()
            return place + 1
        return self._scalar(text, place) if "V" in wanted else -1

    def _scalar(self, text: str, place: int) -> int:
        end = _end_of(_SCALAR, text, place)
        scalar = text[place:end]
        if end == len(text):
            # More of it may come.
            is_begun = any(word.startswith(scalar) for word in _WORDS) or _NUMBER_BEGUN.fullmatch(scalar)
            self._begun = scalar
            return end if is_begun else -1
        self._wanted = self._behind_value()
        return end if scalar in _WORDS or _NUMBER.fullmatch(scalar) else -1

    def _sign(self, sign: str) -> None:
        match sign:
            case "{":
                self._closing.append("}")
                self._wanted = "K}"
            case "[":
                self._closing.append("]")
                self._wanted = "V]"
            case "}" | "]":
                self._closing.pop()
                self._wanted = self._behind_value()
            case ":":
                self._wanted = "V"
            case ",":
                self._wanted = "K" if self._closing[-1] == "}" else "V"

    def _behind_value(self) -> str:
        return f",{self._closing[-1]}" if self._closing else ""


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    """Return the place behind what a pattern matches at `place`, which is `place` if it matches nothing."""
    match = pattern.match(text, place)
    return place if match is None else match.end()


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
