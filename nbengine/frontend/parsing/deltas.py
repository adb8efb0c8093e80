"""The parts of an answer, in the order in which a parser finds them."""

from __future__ import annotations

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning."""

    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the content."""

    text: str


class ToolCallStarted(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool has begun; its arguments follow. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


class ToolCallEnded(msgspec.Struct, frozen=True, gc=False):
    """A call is complete, and its arguments together are a JSON object."""

    index: int


class MalformedCall(msgspec.Struct, frozen=True, gc=False):
    """A call that cannot be read. Its text, with all markers, counts as content.

    If the call had been started, `index` is its index, and nothing more comes of it: what has been handed out
    of it is void. Otherwise `index` is None.
    """

    text: str
    reason: str
    index: int | None = None


AnswerDelta = ReasoningDelta | ContentDelta | ToolCallStarted | ArgumentsDelta | ToolCallEnded | MalformedCall
