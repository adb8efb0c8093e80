"""Calls as Llama 3 writes them: the whole answer is `{"name": ..., "parameters": {...}}`, or several of them."""

from __future__ import annotations

import re

from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import SPACES
from nbengine.frontend.parsing.tools.json_calls import JsonCallParser

_KEYS = ("name", "type", "function", "parameters", "arguments")
_BEGUN = re.compile(r'\{\s*(?:"(\w*)("?))?')


class Llama3JsonToolParser(JsonCallParser):
    """The parser of calls without a marker, or behind `<|python_tag|>`; a semicolon may stand between them.

    Without the marker an answer is a call only if it begins as one, and if its name is that of a tool.
    """

    begins = ("<|python_tag|>",)

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._is_marked = False
        self._state = self._at_start

    def _at_start(self) -> bool:
        place = self._behind_spaces(self._at)
        if place == len(self._text) and not self._is_final:
            return False
        if self._text[place : place + 1] == "{":
            self._content(self._text[self._at : place])
            self._at = place
            self._open_unmarked()
        else:
            self._state = self._in_content
        return True

    def _open_unmarked(self) -> None:
        self._raw = []
        self._is_open = True
        self._is_marked = False
        self._state = self._at_brace

    def _at_brace(self) -> bool:
        """Find out whether the object that begins here may be a call."""
        begun = _BEGUN.match(self._text, self._at)
        if begun is None:
            return False
        key = begun[1] or ""
        if begun[2]:
            if key in _KEYS:
                self._read_call()
                return True
        elif begun.end() == len(self._text) and any(word.startswith(key) for word in _KEYS):
            return False
        self._give_back()
        return True

    def _begin_call(self, marker: str) -> None:
        del marker
        self._is_marked = True
        self._state = self._behind_marker

    def _behind_marker(self) -> bool:
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        self._read_call()
        return True

    def _accepts(self, name: str) -> bool:
        if self._is_marked or self._tools.may_be_called(name):
            return True
        self._give_back()
        return False

    def _fail(self, reason: str) -> None:
        if self._is_marked or self._name is not None:
            super()._fail(reason)
        else:
            self._give_back()

    def _cut_off(self) -> None:
        if self._is_marked or self._name is not None:
            super()._cut_off()
        else:
            self._give_back()

    def _give_back(self) -> None:
        """Go on as if nothing looked like a call here."""
        text = "".join(self._raw)
        self._close()
        if text:
            self._content(text)

    def _after_call(self) -> None:
        self._state = self._between

    def _between(self) -> bool:
        """Look for another call, behind a semicolon or white space."""
        text = self._text
        place = self._at
        while place < len(text) and (text[place] in SPACES or text[place] == ";"):
            place += 1
        if place == len(text) and not self._is_final:
            return False
        if text[place : place + 1] == "{":
            is_marked = self._is_marked
            self._open_unmarked()
            self._is_marked = is_marked
            self._take(place)
        else:
            self._close()
        return True
