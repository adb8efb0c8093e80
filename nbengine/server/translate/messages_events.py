"""An answer as Anthropic's `/v1/messages` gives it: the events of a stream, and the message that they amount to."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from nbengine.frontend.parsing.deltas import AnswerDelta
from nbengine.frontend.parsing.json_text import ObjectPrefix
from nbengine.server.events import HOLE, Frame, event
from nbengine.server.protocol.messages import MessagesRequest
from nbengine.server.translate.segments import Logprobs, Segment, Segmenter
from nbengine.server.translate.usage import Usage


def new_message_id() -> str:
    """Make the id of a message."""
    return f"msg_{secrets.token_hex(12)}"


class MessageBuilder:
    """The state machine that makes events and the message from the parts of an answer.

    Use it in this order: `start`, then `add` for each part, then `finish`; each returns the events that are due,
    encoded. `message` is the message as it stands; after the end it is the whole.
    """

    def __init__(self, request: MessagesRequest, model: str, message_id: str) -> None:
        self._events: list[bytes] = []
        self._frame: Frame | None = None
        """The events of more of the block that is open; None: it has none."""
        self._arguments = ObjectPrefix()
        """The check of the call that is open."""
        self._segmenter = Segmenter(self)
        self._stop_sequences = request.stop_sequences or []
        self._max_tokens = request.max_tokens
        self._prompt_only = request.max_tokens == 0
        self._has_call = False
        thinking = request.thinking
        self._hides_thinking = thinking is not None and thinking.display == "omitted"
        self.message: dict[str, Any] = {
            "id": message_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(Usage()),
        }

    def start(self, usage: Usage) -> bytes:
        """Return the event at the beginning of a stream; `usage` has what the prompt costs."""
        self.message["usage"] = _usage(self._counted(usage))
        self._emit("message_start", message={**self.message, "content": []})
        return self._taken()

    def add(self, deltas: Iterable[AnswerDelta]) -> bytes:
        """Take in parts of the answer."""
        if not self._prompt_only:
            self._segmenter.feed(deltas)
        return self._taken()

    def finish(self, finish_reason: str, stop_reason: int | str | None, usage: Usage) -> bytes:
        """Take in the end of the answer, with the engine's reasons for it."""
        self._segmenter.finish()
        usage = self._counted(usage)
        reason, sequence = self._reason(finish_reason, stop_reason, usage)
        self.message |= {"stop_reason": reason, "stop_sequence": sequence, "usage": _usage(usage)}
        delta: dict[str, Any] = {"stop_reason": reason, "stop_sequence": sequence}
        if self._segmenter.unreadable:
            self.message["unreadable_tool_calls"] = delta["unreadable_tool_calls"] = (
                self._segmenter.unreadable
            )
        self._emit("message_delta", delta=delta, usage=_usage(usage))
        self._emit("message_stop")
        return self._taken()

    def opened(self, segment: Segment) -> None:
        """Emit the beginning of a block."""
        block: dict[str, Any] = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": HOLE}
        if segment.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            delta = {"type": "thinking_delta", "thinking": HOLE}
        elif segment.kind == "call":
            block = {"type": "tool_use", "id": segment.call_id, "name": segment.name, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": HOLE}
            self._arguments = ObjectPrefix()
        self._emit("content_block_start", index=segment.index, content_block=block)
        hidden = segment.kind == "reasoning" and self._hides_thinking
        kind = "content_block_delta"
        more = {"type": kind, "index": segment.index, "delta": delta}
        self._frame = None if hidden else Frame(more, kind)

    def grown(self, segment: Segment, text: str, _logprobs: Logprobs, /) -> None:
        """Emit more of a block; this API has no log probabilities.

        Anthropic's client reads arguments as they come, and ends the stream with an error where they are no JSON.
        A call in which that happens is voided in the end.
        """
        if segment.kind == "call" and self._frame is not None and not self._arguments.take(text):
            self._frame = None
        if self._frame is not None:
            self._events.append(self._frame.event(text))

    def closed(self, segment: Segment) -> None:
        """Emit the end of a block, and keep it for the message."""
        text = segment.text
        block: dict[str, Any]
        match segment.kind:
            case "text":
                block = {"type": "text", "text": text}
            case "reasoning":
                # Nothing is signed here: the text itself is taken back as it comes.
                signature = {"type": "signature_delta", "signature": ""}
                self._emit("content_block_delta", index=segment.index, delta=signature)
                thinking = "" if self._hides_thinking else text
                block = {"type": "thinking", "thinking": thinking, "signature": ""}
            case "call":
                self._has_call = True
                arguments = json.loads(text) if text else {}
                call = {"id": segment.call_id, "name": segment.name, "input": arguments}
                block = {"type": "tool_use", **call}
        self.message["content"].append(block)
        self._emit("content_block_stop", index=segment.index)

    def voided(self, segment: Segment) -> None:
        """Emit the end of a block that is no call: unless others follow, `stop_reason` is not `tool_use`."""
        self._emit("content_block_stop", index=segment.index)

    def _counted(self, usage: Usage) -> Usage:
        return Usage(usage.prompt_tokens, usage.cached_tokens) if self._prompt_only else usage

    def _reason(
        self, finish_reason: str, stop_reason: int | str | None, usage: Usage
    ) -> tuple[str, str | None]:
        if finish_reason == "length" or self._prompt_only:
            cut = usage.output_tokens >= self._max_tokens
            return ("max_tokens" if cut else "model_context_window_exceeded"), None
        if isinstance(stop_reason, str) and stop_reason in self._stop_sequences:
            return "stop_sequence", stop_reason
        return ("tool_use" if self._has_call else "end_turn"), None

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append(event({"type": kind, **fields}, kind))

    def _taken(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the tokens as Anthropic counts them: those from the cache are not among the input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
    }
