"""Literals as Python writes them, made into JSON.

`ast.literal_eval` would compile what a model has written: that warns the user of its escapes and numbers.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MOST_DEPTH = 64
_SPACES = re.compile(r"\s*")
_NUMBER = re.compile(r"[+-]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_LETTERS = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}


def json_of_literal(text: str) -> str | None:
    """Return the JSON of a literal, None if the text is none; keys of dicts become strings as in `json`."""
    reader = _Reader(text)
    try:
        value = reader.value(0)
        return json.dumps(value, ensure_ascii=False, allow_nan=False) if reader.is_at_end() else None
    except (ValueError, TypeError):
        return None


class _Reader:
    """A reader of one literal; it raises ValueError where the text is none."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0

    def is_at_end(self) -> bool:
        """Tell whether nothing but white space follows."""
        return not self._next()

    def value(self, depth: int) -> Any:
        """Read a value."""
        if depth > _MOST_DEPTH:
            raise ValueError("too deep")
        begin = self._next()
        if begin in ("[", "("):
            return self._items("]" if begin == "[" else ")", depth)
        if begin == "{":
            return self._members(depth)
        if begin in ("'", '"'):
            return self._string()
        if (word := self._match(_WORD)) is not None:
            if word[0] not in _WORDS:
                raise ValueError(word[0])
            return _WORDS[word[0]]
        number = self._match(_NUMBER)
        if number is None:
            raise ValueError("no literal")
        digits = number[0]
        return float(digits) if set(digits) & set(".eE") else int(digits)

    def _items(self, closing: str, depth: int) -> Any:
        self._place += 1
        items: list[Any] = []
        has_comma = False
        while not self._takes(closing):
            items.append(self.value(depth + 1))
            has_comma = self._takes(",")
            if not has_comma and self._next() != closing:
                raise ValueError("no comma")
        # Round brackets around a single value are no tuple.
        return items[0] if closing == ")" and len(items) == 1 and not has_comma else items

    def _members(self, depth: int) -> dict[Any, Any]:
        self._place += 1
        members = {}
        while not self._takes("}"):
            key = self.value(depth + 1)
            if not self._takes(":"):
                raise ValueError("no colon")
            members[key] = self.value(depth + 1)
            if not self._takes(",") and self._next() != "}":
                raise ValueError("no comma")
        return members

    def _string(self) -> str:
        """Read a string, or several that stand side by side."""
        parts = []
        while (string := self._match(_STRING)) is not None:
            parts.append(_ESCAPE.sub(_unescaped, string[1] if string[1] is not None else string[2]))
            self._next()
        if not parts:
            raise ValueError("no end of a string")
        return "".join(parts)

    def _next(self) -> str:
        """Skip white space and return the next character."""
        spaces = self._match(_SPACES)
        return "" if spaces is None else self._text[self._place : self._place + 1]

    def _takes(self, sign: str) -> bool:
        found = self._next() == sign
        self._place += found
        return found

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._text, self._place)
        if match is not None:
            self._place = match.end()
        return match


def _unescaped(match: re.Match[str]) -> str:
    escape = match[1]
    if len(escape) > 1 and escape[0] in "xuU":
        return chr(int(escape[1:], 16))
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    # As in Python, a backslash in front of another character stands for itself.
    return _LETTERS.get(escape, match[0])
