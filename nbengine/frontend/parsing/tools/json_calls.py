"""Calls that are written as one JSON object, with a name and arguments."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from nbengine.frontend.parsing.json_text import ObjectEnd, read_object
from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import ToolParser

_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_MOST_HEAD = 512
"""Characters in which a name must have come; where it has not, the call comes in one piece at its end."""


class JsonCallParser(ToolParser):
    """The base of the parsers of such calls: `_read_call` reads the one that begins here.

    The arguments are handed out as they come if the name stands in front of them. Otherwise the call is
    handed out when it is complete.
    """

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._begun = 0
        """The number of parts of `_raw` that stand in front of the call's object."""
        self._num_scanned = 0
        self._may_have_head = True

    def _read_call(self) -> None:
        self._object_end = ObjectEnd()
        self._num_scanned = 0
        self._may_have_head = True
        self._begun = len(self._raw)
        self._state = self._in_object

    def _in_object(self) -> bool:
        text, start = self._text, self._at
        if start == len(text):
            return False
        if text[start] != "{":
            self._fail("no JSON object follows its beginning")
            return True
        if self._may_have_head:
            match = _HEAD.match(text, start)
            if match is not None and match.end() - start <= _MOST_HEAD:
                return self._behind_head(match)
            self._may_have_head = len(text) - start < _MOST_HEAD
        end = self._object_end.find(text, start + self._num_scanned)
        if end < 0:
            self._num_scanned = len(text) - start
            return False
        self._whole(self._take(end))
        return True

    def _behind_head(self, match: re.Match[str]) -> bool:
        name = _read_name(match[1])
        if not name:
            self._take(match.end())
            self._fail("its name cannot be read")
            return True
        if not self._accepts(name):
            return True
        self._take(match.end())
        self._start(name)
        self._read_arguments()
        return True

    def _accepts(self, name: str) -> bool:
        """Tell whether a call may have this name; if not, choose the state in which to go on."""
        del name
        return True

    def _behind_arguments(self) -> None:
        self._object_end = ObjectEnd(depth=1)
        self._state = self._in_tail

    def _in_tail(self) -> bool:
        """Read the rest of the call's object."""
        text = self._text
        end = self._object_end.find(text, self._at)
        self._take(len(text) if end < 0 else end)
        if end < 0:
            return False
        found = read_object("".join(self._raw[self._begun :]))
        if isinstance(found, str):
            self._fail(found)
        else:
            self._end()
        return True

    def _whole(self, text: str) -> None:
        """Hand out a call whose object has come whole."""
        found = read_object(text)
        if isinstance(found, str):
            self._fail(found)
            return
        call = _function_of(found)
        name = call.get("name")
        if not isinstance(name, str) or not name:
            self._fail('it has no "name"')
        elif self._accepts(name):
            arguments = _arguments_of(call)
            if arguments is None:
                self._fail("its arguments are not a JSON object")
            else:
                self._emit(name, arguments)


def _function_of(found: dict[str, Any]) -> dict[str, Any]:
    function = found.get("function")
    return function if isinstance(function, dict) else found


def _arguments_of(call: dict[str, Any]) -> str | None:
    """Return the JSON text of a call's arguments; None if they are no object."""
    arguments = call.get("arguments", call.get("parameters"))
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        return arguments if isinstance(read_object(arguments), dict) else None
    return msgspec.json.encode(arguments).decode() if isinstance(arguments, dict) else None


def _read_name(text: str) -> str:
    found = read_object(f'{{"name":{text}}}')
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else ""
