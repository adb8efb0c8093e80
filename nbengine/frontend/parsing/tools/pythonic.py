"""Calls that are written as Python, as Llama 3.2 and 4 do: the whole answer is `[f(a=1), g(b="x")]`."""

from __future__ import annotations

import re

from nbengine.frontend.parsing.json_text import quoted
from nbengine.frontend.parsing.python_literals import json_of_literal
from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import MOST_NAME, ToolParser

_HEAD = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
_HEAD_BEGUN = re.compile(r"\s*(?:[A-Za-z_][\w.-]*\s*)?")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_OUTSIDE = re.compile(r"""["'()\[\]{},]""")
_MOST_DEPTH = 64


class PythonicToolParser(ToolParser):
    """The parser of a list of calls with named arguments, which are literals; markers may stand around it.

    Without a marker an answer is such a list only if it begins as one, with the name of a tool. Each argument
    is handed out when it is complete.
    """

    begins = ("<|python_start|>",)
    ends = ("<|python_end|>",)

    def __init__(self, tools: ToolTypes) -> None:
        super().__init__(tools)
        self._is_marked = False
        self._is_first = True
        self._quote = ""
        self._depth = 0
        self._num_scanned = 0
        self._num_arguments = 0
        self._state = self._at_start

    def _at_start(self) -> bool:
        place = self._behind_spaces(self._at)
        if place == len(self._text) and not self._is_final:
            return False
        if self._text[place : place + 1] == "[":
            self._content(self._text[self._at : place])
            self._at = place
            self._raw = []
            self._is_open = True
            self._begin_list()
        else:
            self._state = self._in_content
        return True

    def _begin_call(self, marker: str) -> None:
        del marker
        self._is_marked = True
        self._state = self._behind_marker

    def _behind_marker(self) -> bool:
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        if self._text[self._at] == "[":
            self._begin_list()
        else:
            self._fail("no list of calls follows its beginning")
        return True

    def _begin_list(self) -> None:
        self._take(self._at + 1)
        self._is_first = True
        self._state = self._in_head

    def _in_head(self) -> bool:
        """Read a name and the bracket of its arguments."""
        text, start = self._text, self._at
        head = _HEAD.match(text, start)
        if head is None or head.end() - start > MOST_NAME:
            begun = _HEAD_BEGUN.match(text, start)
            if head is None and begun is not None and begun.end() == len(text) <= start + MOST_NAME:
                return False
            self._fail("a call has no name")
        elif not (self._is_marked or not self._is_first or self._tools.may_be_called(head[1])):
            self._give_back()
        else:
            self._take(head.end())
            self._start(head[1])
            self._is_first = False
            self._num_arguments = 0
            self._read_argument()
        return True

    def _read_argument(self) -> None:
        self._num_scanned = self._depth = 0
        self._quote = ""
        self._state = self._in_argument

    def _in_argument(self) -> bool:
        """Look for the comma or the bracket behind an argument."""
        text = self._text
        place = self._at + self._num_scanned
        while (match := self._next_sign(place)) is not None:
            sign, place = match[0], match.end()
            if sign == "\\":
                if place == len(text):
                    place -= 1
                    break
                place += 1
            elif sign in "\"'":
                self._quote = "" if self._quote else sign
            elif self._depth == 0 and sign in ",)":
                self._argument(text[self._at : match.start()], sign, place)
                return True
            else:
                self._depth += (sign in "([{") - (sign in ")]}")
                if not 0 <= self._depth <= _MOST_DEPTH:
                    self._take(place)
                    self._fail("the brackets of its arguments do not match, or are too deep")
                    return True
        else:
            place = len(text)
        self._num_scanned = place - self._at
        return False

    def _next_sign(self, place: int) -> re.Match[str] | None:
        pattern = _IN_STRINGS[self._quote] if self._quote else _OUTSIDE
        return pattern.search(self._text, place)

    def _argument(self, text: str, sign: str, end: int) -> None:
        """Hand out an argument that is complete, and go on behind the sign that follows it."""
        self._take(end)
        if text.strip() or (sign == "," and not self._num_arguments):
            written = _json_argument(text)
            if written is None:
                self._fail("an argument is no name with a literal")
                return
            self._argue(f"{', ' if self._num_arguments else '{'}{written}")
            self._num_arguments += 1
        if sign == ",":
            self._read_argument()
        else:
            self._argue("}" if self._num_arguments else "{}")
            self._end()

    def _after_call(self) -> None:
        self._state = self._between

    def _between(self) -> bool:
        """Read the comma or the bracket behind a call."""
        self._take(self._behind_spaces(self._at))
        if self._at == len(self._text):
            return False
        follows = self._take(self._at + 1)
        if follows == ",":
            self._state = self._in_head
        elif follows == "]":
            self._raw = []
            self._state = self._at_end
        else:
            self._fail("neither a comma nor a bracket follows the call before it")
        return True

    def _fail(self, reason: str) -> None:
        if self._is_marked or not self._is_first:
            super()._fail(reason)
        else:
            self._give_back()

    def _cut_off(self) -> None:
        if not self._is_marked and self._is_first:
            self._give_back()
        elif not self._name and not "".join(self._raw).strip() + self._text[self._at :].strip():
            # The calls are whole; only the bracket behind the last of them has not come.
            self._close()
        else:
            super()._cut_off()

    def _give_back(self) -> None:
        """Go on as if nothing looked like a call here."""
        text = "".join(self._raw)
        self._close()
        self._content(text)


_IN_STRINGS = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


def _json_argument(text: str) -> str | None:
    """Write a named argument as a member of a JSON object; None if it is none."""
    match = _ARGUMENT.match(text)
    if match is None:
        return None
    value = json_of_literal(text[match.end() :])
    return None if value is None else f"{quoted(match[1])}: {value}"
