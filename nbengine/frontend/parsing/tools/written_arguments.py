"""Calls whose arguments are written one by one as plain text; these parsers make JSON of them."""

from __future__ import annotations

from typing import ClassVar

from nbengine.frontend.parsing.json_text import escaped, quoted
from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.schemas import STRING, ToolTypes, json_of
from nbengine.frontend.parsing.tools.base import ToolParser


class WrittenArgumentsParser(ToolParser):
    """The base of the parsers of such calls: `_read_value` reads the value that begins here.

    A string is handed out as it comes. A value of another type, or of one that the tool's schema does not
    tell, is handed out when it is complete, because its type decides how it is written in JSON.
    """

    value_ends: ClassVar[tuple[str, ...]] = ()
    """The markers with which a value ends."""

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._value_ends = Markers.of(*self.value_ends)
        self._parts: list[str] = []
        self._types = STRING
        self._num_arguments = 0

    def _begin_arguments(self, name: str) -> None:
        self._start(name)
        self._num_arguments = 0

    def _read_value(self, key: str) -> None:
        self._argue(f"{', ' if self._num_arguments else '{'}{quoted(key)}: ")
        self._num_arguments += 1
        self._types = self._tools.of(self._name or "", key)
        self._parts = []
        if self._types == STRING:
            self._argue('"')
        self._state = self._in_value

    def _in_value(self) -> bool:
        text, start = self._text, self._at
        match = self._value_ends.find(text, start)
        end = self._value_ends.held_from(text, start) if match is None else match.start()
        piece = self._take(end)
        if self._types == STRING:
            self._argue(escaped(piece))
        else:
            self._parts.append(piece)
        if match is None:
            return False
        self._take(match.end())
        self._argue('"' if self._types == STRING else json_of("".join(self._parts), self._types))
        self._behind_value()
        return True

    def _behind_value(self) -> None:
        """Choose the state behind a value."""
        raise NotImplementedError

    def _end_arguments(self) -> None:
        self._argue("}" if self._num_arguments else "{}")
        self._end()
