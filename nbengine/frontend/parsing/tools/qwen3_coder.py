"""Calls as Qwen3-Coder writes them: a function and its parameters as tags."""

from __future__ import annotations

from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import MOST_NAME
from nbengine.frontend.parsing.tools.written_arguments import WrittenArgumentsParser

CALL, FUNCTION, PARAMETER = "<tool_call>", "<function=", "<parameter="
PARAMETER_END, FUNCTION_END, CALL_END = "</parameter>", "</function>", "</tool_call>"


class Qwen3CoderToolParser(WrittenArgumentsParser):
    """The parser of `<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`.

    One line break behind the opening tag of a parameter and one in front of its closing tag do not belong to
    the value. The outer tags may be missing.
    """

    begins = (CALL, FUNCTION)
    ends = (CALL_END,)
    restarts = (CALL,)
    value_ends = (PARAMETER_END, f"\n{PARAMETER_END}")
    keeps_special_tokens = False

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._within = Markers.of(PARAMETER, FUNCTION_END)
        self._functions = Markers.of(FUNCTION)
        self._key = ""

    @classmethod
    def markers(cls) -> frozenset[str]:
        return frozenset((CALL, CALL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END))

    def _begin_call(self, marker: str) -> None:
        self._state = self._behind_marker if marker == CALL else self._in_name

    def _behind_marker(self) -> bool:
        place = self._behind_spaces(self._at)
        match = self._functions.at(self._text, place)
        if match is not None:
            self._take(match.end())
            self._state = self._in_name
        elif self._functions.may_begin_at(self._text, place):
            return False
        else:
            self._fail("no function follows its beginning")
        return True

    def _in_name(self) -> bool:
        name = self._up_to_bracket()
        if name:
            self._begin_arguments(name)
            self._state = self._in_function
        return name is not None

    def _in_function(self) -> bool:
        place = self._behind_spaces(self._at)
        match = self._within.at(self._text, place)
        if match is None:
            if self._within.may_begin_at(self._text, place):
                return False
            self._fail("neither a parameter nor the end of the function follows")
            return True
        self._take(match.end())
        if match[0] == PARAMETER:
            self._state = self._in_key
        else:
            self._end_arguments()
        return True

    def _in_key(self) -> bool:
        key = self._up_to_bracket()
        if key:
            self._key = key
            self._state = self._behind_key
        return key is not None

    def _behind_key(self) -> bool:
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "\n":
            # The line break may be that in front of the closing tag, too.
            self._take(self._at + 1)
        self._read_value(self._key)
        return True

    def _behind_value(self) -> None:
        self._state = self._in_function

    def _up_to_bracket(self) -> str | None:
        """Read a name with the bracket that ends its tag; None: more text is needed; empty: it is malformed."""
        text, start = self._text, self._at
        place = text.find(">", start)
        if place < 0 and len(text) - start <= MOST_NAME:
            return None
        name = text[start:place].strip() if 0 <= place <= start + MOST_NAME else ""
        if name:
            self._take(place + 1)
        else:
            self._fail("a tag has no name")
        return name
