"""Calls as GLM-4.5 and its successors write them: a name, then keys and values between tags."""

from __future__ import annotations

from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import MOST_NAME
from nbengine.frontend.parsing.tools.written_arguments import WrittenArgumentsParser

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


class GlmToolParser(WrittenArgumentsParser):
    """The parser of `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`; white space
    may stand between the tags."""

    begins = (CALL,)
    ends = (CALL_END,)
    value_ends = (VALUE_END,)
    keeps_special_tokens = False

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._behind_name = Markers.of(KEY, CALL_END)
        self._values = Markers.of(VALUE)
        self._key = ""

    @classmethod
    def markers(cls) -> frozenset[str]:
        return frozenset((CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END))

    def _begin_call(self, marker: str) -> None:
        del marker
        self._state = self._in_name

    def _in_name(self) -> bool:
        text, start = self._text, self._at
        match = self._behind_name.find(text, start)
        if match is None and len(text) - start <= MOST_NAME:
            return False
        place = len(text) if match is None else match.start()
        name = text[start:place].strip() if place - start <= MOST_NAME else ""
        if not name or len(name.split()) > 1:
            self._fail("no name follows its beginning")
            return True
        self._take(place)
        self._begin_arguments(name)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        place = self._behind_spaces(self._at)
        match = self._behind_name.at(self._text, place)
        if match is None:
            if self._behind_name.may_begin_at(self._text, place):
                return False
            self._fail("neither a key nor its end follows")
        elif match[0] == KEY:
            self._take(match.end())
            self._state = self._in_key
        else:
            self._take(match.end())
            self._end_arguments()
        return True

    def _in_key(self) -> bool:
        text, start = self._text, self._at
        place = text.find(KEY_END, start)
        if place < 0 and len(text) - start < MOST_NAME + len(KEY_END):
            return False
        key = text[start:place].strip() if 0 <= place <= start + MOST_NAME else ""
        if not key:
            self._fail("a key has no name")
            return True
        self._take(place + len(KEY_END))
        self._key = key
        self._state = self._behind_key
        return True

    def _behind_key(self) -> bool:
        place = self._behind_spaces(self._at)
        match = self._values.at(self._text, place)
        if match is not None:
            self._take(match.end())
            self._read_value(self._key)
        elif self._values.may_begin_at(self._text, place):
            return False
        else:
            self._fail("no value follows a key")
        return True

    def _behind_value(self) -> None:
        self._state = self._in_call

    def _after_call(self) -> None:
        self._close()
