"""Calls as DeepSeek V3, R1 and V3.1 write them, between markers of their own."""

from __future__ import annotations

import re

from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import MOST_NAME, ToolParser

LIST_BEGIN, LIST_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_HEAD = re.compile(r"\s*([^\s`{]*)\s*(?:```(?:json)?\s*)?")


class DeepSeekToolParser(ToolParser):
    """The parser of both forms of a call, the kind and then the name (V3, R1), or the name alone (V3.1).

    The first is `function<｜tool▁sep｜>NAME` with a fenced JSON object on the next lines, the second
    `NAME<｜tool▁sep｜>{...}`.
    """

    begins = (LIST_BEGIN, CALL_BEGIN)
    ends = (CALL_END, LIST_END)
    restarts = (LIST_BEGIN,)

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._between_markers = Markers.of(CALL_BEGIN, CALL_END, LIST_END, _FENCE)
        self._head = ""

    @classmethod
    def markers(cls) -> frozenset[str]:
        return frozenset((*cls.begins, *cls.ends, SEPARATOR))

    def _begin_call(self, marker: str) -> None:
        self._state = self._between if marker == LIST_BEGIN else self._in_head

    def _between(self) -> bool:
        """Read the markers between two calls, or those behind the last one."""
        text = self._text
        place = self._behind_spaces(self._at)
        match = self._between_markers.at(text, place)
        if match is None:
            if not self._is_final and self._between_markers.may_begin_at(text, place):
                return False
            self._not_between()
        elif match[0] == CALL_BEGIN:
            self._take(match.end())
            self._state = self._in_head
        elif self._raw:
            self._fail("no call follows its beginning")
        elif match[0] == LIST_END:
            self._at = match.end()
            self._close()
        else:
            self._at = match.end()
        return True

    def _not_between(self) -> None:
        if self._raw:
            self._fail("no call follows its beginning")
        else:
            self._close()

    def _in_head(self) -> bool:
        """Read up to the separator: the name, or the kind of the tool."""
        text, start = self._text, self._at
        place = text.find(SEPARATOR, start)
        if place < 0 and len(text) - start < MOST_NAME + len(SEPARATOR):
            return False
        if place < 0 or place - start > MOST_NAME:
            self._fail("its name does not come")
            return True
        self._head = text[start:place].strip()
        self._take(place + len(SEPARATOR))
        self._state = self._behind_separator
        return True

    def _behind_separator(self) -> bool:
        text, start = self._text, self._at
        brace = text.find("{", start)
        if brace < 0 and len(text) - start <= MOST_NAME:
            return False
        head = None if brace < 0 or brace - start > MOST_NAME else _HEAD.fullmatch(text, start, brace)
        name = (head[1] or self._head) if head else ""
        if not name:
            self._fail("no name with arguments follows its beginning")
            return True
        self._take(brace)
        self._start(name)
        self._read_arguments()
        return True

    def _after_call(self) -> None:
        self._state = self._between
