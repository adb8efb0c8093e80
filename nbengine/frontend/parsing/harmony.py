"""The harmony format of gpt-oss, in which reasoning, content and calls are messages on channels of one answer."""

from __future__ import annotations

import re

from nbengine.frontend.parsing.deltas import AnswerDelta, ContentDelta, ReasoningDelta
from nbengine.frontend.parsing.markers import Markers
from nbengine.frontend.parsing.reasoning.base import ReasoningParser
from nbengine.frontend.parsing.schemas import ToolTypes
from nbengine.frontend.parsing.tools.base import CUT_OFF, ToolParser

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_MOST_HEADER = 1024
_BETWEEN_THOUGHTS = "\n"


class HarmonyReasoningParser(ReasoningParser):
    """The markers of gpt-oss's reasoning; `HarmonyParser` reads it, together with calls."""

    tags = ((ANALYSIS, FINAL),)
    other_endings = (f"{CHANNEL}final {CONSTRAIN}json{MESSAGE}",)
    is_always_closed = True
    ends_without_answer = (CALL,)
    keeps_special_tokens = True

    @classmethod
    def closing_text(cls) -> str:
        return f"{END}{START}assistant{FINAL}"


class HarmonyParser(ToolParser):
    """The parser of messages `<|channel|>NAME<|message|>TEXT<|end|>`, of which the answer's first goes on
    behind `<|start|>assistant` in the prompt.

    Messages on the channel `analysis` are reasoning, those to a recipient (`to=functions.NAME`) are calls, and
    the others are content.
    """

    begins = (START, CHANNEL, MESSAGE, CONSTRAIN)
    ends = (END, CALL, RETURN)

    def __init__(self, tools: ToolTypes, *, prompt_opens_reasoning: bool = False) -> None:
        super().__init__(tools)
        self._body_ends = Markers.of(END, CALL, RETURN, START, CHANNEL)
        self._recipients = Markers.of(" to=", "to=")
        self._has_reasoning = False
        self._wants_gap = False
        self.is_reasoning = prompt_opens_reasoning
        """True within a message that is reasoning."""
        self._is_call = False
        self._state = self._in_body if prompt_opens_reasoning else self._at_start

    def finish(self, out: list[AnswerDelta]) -> None:
        self._is_final = True
        self.feed("", out)
        if self._is_call and self._state == self._in_body:
            # The marker that ends a call is an end of the sequence, which the text may lack.
            self._end()
        elif self._is_open and "to=" in (header := "".join(self._raw) + self._text[self._at :]):
            self._reason = CUT_OFF
            self._malformed(header)
        if self._reason and self._name is not None:
            self._reason = CUT_OFF
            self._malformed("".join(self._raw))
        if self._spaces and not self._num_started:
            out.append(ContentDelta(self._spaces))
        self._spaces = ""

    def _at_start(self) -> bool:
        """Find out whether the text goes on with a header, as the prompt wants it, or is plain."""
        text = self._text
        place = self._behind_spaces(self._at)
        if not self._is_final and (
            self._begins.may_begin_at(text, place) or self._recipients.may_begin_at(text, place)
        ):
            return False
        is_header = self._begins.at(text, place) or self._recipients.at(text, place)
        self._state = self._in_content
        if is_header:
            self._at = place
            self._open_header()
        return True

    def _in_content(self) -> bool:
        """Read text that stands outside of all messages."""
        text, start = self._text, self._at
        match = self._landmarks.find(text, start, final=self._is_final)
        if match is None:
            end = len(text) if self._is_final else self._landmarks.held_from(text, start)
            self._at = end
            if end > start:
                self._content(text[start:end])
            return False
        self._content(text[start : match.start()])
        self._at = match.start()
        if match[0] in self.ends:
            self._at = match.end()
        else:
            self._open_header()
        return True

    def _open_header(self) -> None:
        self._raw = []
        self._is_open = True
        self._state = self._in_header

    def _in_header(self) -> bool:
        """Read up to the message: its role, channel and recipient."""
        text, start = self._text, self._at
        place = text.find(MESSAGE, start)
        if place < 0 and len(text) - start < _MOST_HEADER + len(MESSAGE):
            return False
        if place < 0 or place - start > _MOST_HEADER:
            self._fail("the header of a message does not end")
            return True
        header = self._take(place + len(MESSAGE))
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._is_call = recipient is not None
        self.is_reasoning = recipient is None and channel is not None and channel[1] == "analysis"
        self._wants_gap = self._has_reasoning
        if recipient is not None:
            self._start(recipient[1].removeprefix("functions."))
        else:
            self._is_open = False
            self._raw = []
        self._state = self._in_body
        return True

    def _in_body(self) -> bool:
        text, start = self._text, self._at
        match = self._body_ends.find(text, start, final=self._is_final)
        if match is not None:
            end = match.start()
        else:
            end = len(text) if self._is_final else self._body_ends.held_from(text, start)
        self._hand_out(self._take(end))
        if match is None:
            return False
        if match[0] not in (START, CHANNEL):
            self._take(match.end())
        self._end_body()
        return True

    def _hand_out(self, piece: str) -> None:
        if self._is_call:
            self._argue(piece)
            return
        self._raw = []
        if not piece:
            return
        if not self.is_reasoning:
            self._content(piece)
            return
        if self._wants_gap:
            piece = _BETWEEN_THOUGHTS + piece
            self._wants_gap = False
        self._has_reasoning = True
        self._out.append(ReasoningDelta(piece))

    def _end_body(self) -> None:
        self.is_reasoning = False
        self._state = self._in_content
        if self._is_call:
            self._is_call = False
            self._end()

    def _after_call(self) -> None:
        self._close()

    def _end(self) -> None:
        if not "".join(self._arguments).strip():
            self._argue("{}")
        super()._end()

    def _fail(self, reason: str) -> None:
        self._reason = reason
        self._malformed("".join(self._raw))
