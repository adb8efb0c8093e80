"""Calls that are written as a JSON list of objects behind a marker."""

from __future__ import annotations

from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.json_calls import JsonCallParser


class JsonListParser(JsonCallParser):
    """The base of the parsers of such lists, or of a single object in place of one."""

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._is_list = False
        self._is_empty = True

    def _begin_call(self, marker: str) -> None:
        del marker
        self._state = self._behind_marker

    def _behind_marker(self) -> bool:
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        self._is_list = self._text[self._at] == "["
        self._is_empty = True
        if self._is_list:
            self._take(self._at + 1)
            self._state = self._in_list
        else:
            self._read_other()
        return True

    def _read_other(self) -> None:
        """Read what is no list."""
        self._read_call()

    def _in_list(self) -> bool:
        """Go on in front of a call, or at the end of an empty list."""
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "]":
            self._take(self._at + 1)
            if self._is_empty:
                self._fail("the list has no call")
            else:
                self._state = self._at_end
        else:
            self._read_call()
        return True

    def _after_call(self) -> None:
        self._is_empty = False
        if self._is_list:
            self._state = self._between
        else:
            super()._after_call()

    def _between(self) -> bool:
        """Read the comma or the bracket behind a call."""
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        follows = self._take(self._at + 1)
        if follows == ",":
            self._state = self._in_list
        elif follows == "]":
            self._raw = []
            self._state = self._at_end
        else:
            self._fail("neither a comma nor a bracket follows the call before it")
        return True

    def _cut_off(self) -> None:
        if not "".join(self._raw).strip() + self._text[self._at :].strip():
            # The calls are whole; only the bracket behind the last of them has not come.
            self._close()
            return
        super()._cut_off()


class GraniteToolParser(JsonListParser):
    """The parser of Granite's calls: `<|tool_call|>[{"name": ..., "arguments": {...}}]`."""

    begins = ("<|tool_call|>", "<tool_call>")
    ends = ("</tool_call>",)
