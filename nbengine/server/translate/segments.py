"""The segments of an answer: reasoning, text and calls, in their order, as APIs of typed blocks show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.outputs import UnreadableCall

Kind = Literal["reasoning", "text", "call"]
Logprobs = list[dict[str, Any]]


class Segment:
    """A stretch of an answer that is all reasoning, all text, or one call.

    `index` counts the segments of the answer from 0, those that turned out void included.
    """

    __slots__ = ("call_id", "index", "kind", "logprobs", "name", "parts")

    def __init__(self, kind: Kind, index: int, call_id: str = "", name: str = "") -> None:
        self.kind = kind
        self.index = index
        self.call_id = call_id
        self.name = name
        self.parts: list[str] = []
        self.logprobs: Logprobs = []

    @property
    def text(self) -> str:
        """Return the reasoning, the text, or the arguments of the call, as far as they have come."""
        return "".join(self.parts)


class SegmentListener(Protocol):
    """The receiver of an answer's segments: one is open at a time."""

    def opened(self, segment: Segment) -> None:
        """A segment begins, without anything in it."""

    def grown(self, segment: Segment, text: str, logprobs: Logprobs, /) -> None:
        """A segment has got more text, and the log probabilities of its tokens if they are wanted."""

    def closed(self, segment: Segment) -> None:
        """A segment is complete."""

    def voided(self, segment: Segment) -> None:
        """A segment was a call that cannot be read; its text follows as text."""


class Segmenter:
    """The state machine that divides an answer into segments.

    White space between segments is no segment: what a model writes between its reasoning and a call, say.
    """

    __slots__ = ("_blank", "_blank_logprobs", "_listener", "_open", "_opened", "unreadable")

    def __init__(self, listener: SegmentListener) -> None:
        self._listener = listener
        self._open: Segment | None = None
        self._opened = 0
        self._blank = ""
        self._blank_logprobs: Logprobs = []
        self.unreadable: list[UnreadableCall] = []
        """The calls that turned out to be none, and why."""

    def feed(self, deltas: Iterable[AnswerDelta], logprobs: Sequence[Logprobs] = ()) -> None:
        """Take in the next parts of the answer, and for each of them the log probabilities of its tokens, if they
        are wanted; only text has any."""
        for place, delta in enumerate(deltas):
            own = logprobs[place] if logprobs else []
            match delta:
                case ContentDelta(text=text):
                    self._add_text(text, own)
                case ReasoningDelta(text=text):
                    self._grow(self._current("reasoning"), text)
                case ToolCallStarted(id=call_id, name=name):
                    self._close()
                    self._begin(Segment("call", self._opened, call_id, name))
                case ArgumentsDelta(text=text):
                    self._grow(self._current("call"), text)
                case ToolCallEnded():
                    self._close()
                case MalformedCall(text=text, reason=reason, index=index):
                    if index is not None:
                        self._void()
                    self.unreadable.append(UnreadableCall(text, reason))
                    self._add_text(text, own)

    def finish(self) -> None:
        """Close what is open. An answer of nothing but white space is text."""
        blank = self._blank
        if blank and not self._opened:
            logprobs = self._blank_logprobs
            self._grow(self._current("text"), blank, logprobs)
        if self._open is not None and self._open.kind == "call":
            # A call that has an end has been closed: the arguments of this one need not be JSON.
            self._void()
        self._close()

    def _add_text(self, text: str, logprobs: Logprobs) -> None:
        if self._open is None or self._open.kind != "text":
            self._blank += text
            self._blank_logprobs += logprobs
            if not text or text.isspace():
                return
            text, logprobs = self._blank, self._blank_logprobs
        self._grow(self._current("text"), text, logprobs)

    def _current(self, kind: Kind) -> Segment:
        if self._open is not None and self._open.kind == kind:
            return self._open
        self._close()
        return self._begin(Segment(kind, self._opened))

    def _begin(self, segment: Segment) -> Segment:
        self._blank, self._blank_logprobs = "", []
        self._opened += 1
        self._open = segment
        self._listener.opened(segment)
        return segment

    def _grow(self, segment: Segment, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> None:
        segment.parts.append(text)
        segment.logprobs += logprobs
        self._listener.grown(segment, text, list(logprobs))

    def _close(self) -> None:
        if self._open is not None:
            segment, self._open = self._open, None
            self._listener.closed(segment)

    def _void(self) -> None:
        if self._open is not None:
            segment, self._open = self._open, None
            self._listener.voided(segment)
