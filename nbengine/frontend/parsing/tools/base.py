"""The base of the parsers of tool calls: text that is waiting, content, and the life of a call."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import ClassVar

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.frontend.parsing.json_text import ObjectEnd, read_object
from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.schemas import ToolTypes

_CHARACTERS = string.ascii_letters + string.digits
CUT_OFF = "the text ended within the call"
SPACES = " \t\r\n"
MOST_NAME = 256
"""Characters in which a name must have come."""


class ToolParser:
    """A parser that finds the calls of tools in a text that arrives in pieces; the rest is content.

    A family says in `begins` with which markers its calls begin, in `ends` with which they may end, and
    defines `_begin_call`. A parser is always in one state: a method that goes on from `_at`, as far as the
    text allows, and returns False when it needs more of it. What it does may depend on the text alone, never
    on the pieces in which the text has come.
    """

    begins: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    restarts: ClassVar[tuple[str, ...]] = ()
    """Those of `begins` that stand in no call: a malformed one ends in front of them."""
    keeps_special_tokens: ClassVar[bool] = True
    """True if its markers may be special tokens, which a detokenizer leaves out unless told otherwise."""

    def __init__(self, tools: ToolTypes) -> None:
        self._tools = tools
        self._begins = Markers.of(*self.begins)
        self._ends = Markers.of(*self.ends)
        self._landmarks = Markers.of(*(self.restarts or self.begins), *self.ends)
        self._text = ""
        self._at = 0
        self._is_final = False
        self._out: list[AnswerDelta] = []
        self._raw: list[str] = []
        """The text of the call that is being read, with the markers in front of it."""
        self._is_open = False
        """True within a call, and between the calls of a list."""
        self._name: str | None = None
        """The name of the call that has been started and not ended."""
        self._arguments: list[str] = []
        self._num_started = 0
        self._spaces = ""
        """White space at the end of the content, which is dropped unless content follows it."""
        self._has_content = False
        self._reason = ""
        self._object_end = ObjectEnd()
        self._state: Callable[[], bool] = self._in_content

    @classmethod
    def markers(cls) -> frozenset[str]:
        """Return the markers of the family."""
        return frozenset((*cls.begins, *cls.ends))

    def feed(self, text: str, out: list[AnswerDelta]) -> None:
        """Read the next piece and append what it brings."""
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0
        self._out = out
        while self._state():
            pass

    def finish(self, out: list[AnswerDelta]) -> None:
        """Append what was held back: nothing follows any more."""
        self._is_final = True
        self.feed("", out)
        while self._is_open:
            self._cut_off()
            self.feed("", out)
        if self._spaces and not self._num_started:
            out.append(ContentDelta(self._spaces))
            self._spaces = ""

    # Content

    def _in_content(self) -> bool:
        text, start = self._text, self._at
        match = self._begins.find(text, start, final=self._is_final)
        if match is None:
            end = len(text) if self._is_final else self._begins.held_from(text, start)
            self._at = end
            if end > start:
                self._content(text[start:end])
            return False
        self._content(text[start : match.start()])
        self._at = match.start()
        self._open(match[0])
        return True

    def _open(self, marker: str) -> None:
        """Go on behind a marker with which a call begins."""
        self._raw = []
        self._is_open = True
        self._take(self._at + len(marker))
        self._begin_call(marker)

    def _begin_call(self, marker: str) -> None:
        """Choose the state in which the text behind `marker` is read."""
        raise NotImplementedError

    def _content(self, text: str) -> None:
        """Hand out content. White space that may stand around calls is held back."""
        if self._spaces:
            text = self._spaces + text
        stripped = text.rstrip(SPACES)
        self._spaces = text[len(stripped) :]
        if not stripped:
            return
        if self._num_started and not self._has_content:
            stripped = stripped.lstrip(SPACES)
        self._has_content = True
        self._out.append(ContentDelta(stripped))

    # The life of a call

    def _start(self, name: str) -> None:
        self._name = name
        self._arguments = []
        self._out.append(ToolCallStarted(self._num_started, self._new_id(), name))
        self._num_started += 1

    def _argue(self, text: str) -> None:
        """Hand out more of the arguments."""
        if text:
            self._arguments.append(text)
            self._out.append(ArgumentsDelta(self._num_started - 1, text))

    def _end(self) -> None:
        """End the call if its arguments are a JSON object; otherwise it is malformed."""
        found = read_object("".join(self._arguments))
        if isinstance(found, str):
            self._fail(f"its arguments cannot be read: {found}")
            return
        self._out.append(ToolCallEnded(self._num_started - 1))
        self._name = None
        self._raw = []
        self._after_call()

    def _after_call(self) -> None:
        """Choose the state behind a call that has ended."""
        self._state = self._at_end

    def _emit(self, name: str, arguments: str) -> None:
        """Hand out a call that is complete."""
        self._start(name)
        self._argue(arguments)
        self._end()

    def _fail(self, reason: str) -> None:
        """Give the call up; its text goes on to the marker that ends it."""
        self._reason = reason
        self._state = self._in_malformed

    def _new_id(self) -> str:
        return "call_" + random_characters(24)

    # States that families share

    def _at_end(self) -> bool:
        """Skip the marker that ends a call, and white space in front of it, if it is there."""
        if not self.ends:
            self._close()
            return True
        place = self._behind_spaces(self._at)
        match = self._ends.at(self._text, place)
        if match is None and not self._is_final and self._ends.may_begin_at(self._text, place):
            return False
        if match is not None:
            self._at = match.end()
        self._close()
        return True

    def _in_arguments(self) -> bool:
        """Hand out a JSON object as it comes."""
        end = self._object_end.find(self._text, self._at)
        if end < 0:
            self._argue(self._take(len(self._text)))
            return False
        self._argue(self._take(end))
        self._behind_arguments()
        return True

    def _read_arguments(self) -> None:
        """Read a JSON object that begins here."""
        self._object_end = ObjectEnd()
        self._state = self._in_arguments

    def _behind_arguments(self) -> None:
        self._end()

    def _in_malformed(self) -> bool:
        text = self._text
        match = self._landmarks.find(text, self._at, final=self._is_final)
        if not self.ends:
            end = self._at
        elif match is not None:
            end = match.end() if match[0] in self.ends else match.start()
        elif not self._is_final:
            self._take(self._landmarks.held_from(text, self._at))
            return False
        else:
            end = len(text)
        self._take(end)
        self._malformed("".join(self._raw))
        return True

    # Tools of the states

    def _take(self, end: int) -> str:
        """Read up to `end`, as a part of the call."""
        piece = self._text[self._at : end]
        self._raw.append(piece)
        self._at = end
        return piece

    def _behind_spaces(self, place: int) -> int:
        text, size = self._text, len(self._text)
        while place < size and text[place] in SPACES:
            place += 1
        return place

    def _close(self) -> None:
        """Return to content."""
        self._is_open = False
        self._name = None
        self._raw = []
        self._state = self._in_content

    def _malformed(self, text: str) -> None:
        if self._spaces:
            self._out.append(ContentDelta(self._spaces))
            self._spaces = ""
        self._has_content = True
        index = None if self._name is None else self._num_started - 1
        self._out.append(MalformedCall(text, self._reason, index))
        self._close()

    def _cut_off(self) -> None:
        """Give up a call whose end has not come, and go on behind the first marker that may have ended it."""
        whole = "".join(self._raw) + self._text[self._at :]
        if not whole:
            self._close()
            return
        opening = self._begins.at(whole, 0)
        match = self._landmarks.find(whole, opening.end() if opening else 1, final=True)
        end = len(whole)
        if match is not None:
            end = match.end() if match[0] in self.ends else match.start()
        self._text, self._at = whole[end:], 0
        self._reason = self._reason or CUT_OFF
        self._malformed(whole[:end])
        self._reason = ""


def random_characters(count: int) -> str:
    """Draw letters and digits."""
    return "".join(secrets.choice(_CHARACTERS) for _ in range(count))
