"""An answer as `/v1/responses` gives it: the events of a stream, and the response that they amount to."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from nbengine.frontend.parsing.deltas import AnswerDelta
from nbengine.server.events import HOLE, Frame, event
from nbengine.server.protocol.errors import ApiError
from nbengine.server.protocol.responses import ResponsesRequest
from nbengine.server.translate.segments import Logprobs, Segment, Segmenter
from nbengine.server.translate.usage import Usage

_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt_cache_key",
    "safety_identifier",
    "temperature",
    "top_p",
    "user",
)
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""The codes of errors in a response, which are not those of OpenAI's error object, by HTTP's status."""
_DELTAS = {"text": "response.output_text.delta", "reasoning": "response.reasoning_text.delta"}
_ITEM_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


def new_response_id() -> str:
    """Make the id of a response; nobody can guess it."""
    return f"resp_{secrets.token_hex(24)}"


class ResponseBuilder:
    """The state machine that makes events and the response from the parts of an answer.

    Use it in this order: `start`, then `add` for each part, then `finish`; `fail` takes their place at any time. Each
    returns the events that are due, encoded. `response` is the response as it stands; after the end it is the whole.
    """

    def __init__(self, request: ResponsesRequest, model: str, response_id: str, created_at: int) -> None:
        self._events: list[bytes] = []
        self._sequence = 0
        self._item_status = "completed"
        self._segmenter = Segmenter(self)
        self._item_suffix = response_id.partition("_")[2]
        self._output: list[dict[str, Any]] = []
        self._frame: Frame | None = None
        """The events of more of the item that is open; None: it is emitted when it is whole."""
        self.response = _begun(request, model, response_id, created_at)

    def start(self) -> bytes:
        """Return the events at the beginning of a stream."""
        self._emit_start()
        return self._taken()

    def add(self, deltas: Iterable[AnswerDelta], logprobs: Sequence[Logprobs] = ()) -> bytes:
        """Take in parts of the answer, and for each of them Chat Completions' entries about its tokens' log
        probabilities, if they are wanted."""
        self._segmenter.feed(deltas, logprobs)
        return self._taken()

    def finish(self, finish_reason: str, usage: Usage) -> bytes:
        """Take in the end of the answer; `finish_reason` is the engine's "stop" or "length"."""
        status = "completed"
        if finish_reason == "length":
            status = "incomplete"
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._item_status = status
        self._segmenter.finish()
        self.response |= {"status": status, "output": self._output, "usage": _usage(usage)}
        if self._segmenter.unreadable:
            self.response["unreadable_tool_calls"] = self._segmenter.unreadable
        self._emit(f"response.{status}", response=self.response)
        return self._taken()

    def fail(self, error: ApiError) -> bytes:
        """Take in that the answer ends in an error; what has come of it stays."""
        if not self._sequence:
            self._emit_start()
        self._item_status = "incomplete"
        self._segmenter.finish()
        code = _FAILURES.get(error.status, "server_error")
        failure = {"code": code, "message": error.message}
        self.response |= {"status": "failed", "output": self._output, "error": failure}
        self._emit("response.failed", response=self.response)
        return self._taken()

    def opened(self, segment: Segment) -> None:
        """Emit the beginning of an item, unless it is a call: those are emitted when they are whole."""
        self._frame = None
        if segment.kind != "call":
            self._emit_added(segment)
            self._emit_part("added", segment, _part(segment, "", []))
            kind = _DELTAS[segment.kind]
            more = {"content_index": 0, "delta": HOLE}
            if segment.kind == "text":
                more["logprobs"] = HOLE
            self._frame = Frame({"type": kind, "sequence_number": HOLE, **self._place(segment), **more}, kind)

    def grown(self, segment: Segment, text: str, logprobs: Logprobs, /) -> None:
        """Emit more of an item."""
        if self._frame is not None:
            of_text = (logprobs,) if segment.kind == "text" else ()
            self._events.append(self._frame.event(self._sequence, text, *of_text))
            self._sequence += 1

    def closed(self, segment: Segment) -> None:
        """Emit the end of an item, and keep it for the response."""
        text = segment.text
        place = self._place(segment)
        part = _part(segment, text, segment.logprobs)
        if segment.kind == "call":
            self._emit_added(segment)
            for piece in segment.parts:
                self._emit("response.function_call_arguments.delta", **place, delta=piece)
            kind = "response.function_call_arguments.done"
            self._emit(kind, **place, name=segment.name, arguments=text)
        else:
            kind, more = "response.reasoning_text.done", {}
            if segment.kind == "text":
                kind, more = "response.output_text.done", {"logprobs": segment.logprobs}
            self._emit(kind, **place, content_index=0, text=text, **more)
            self._emit_part("done", segment, part)
        item = self._item(segment, self._item_status, (part,))
        self._emit("response.output_item.done", output_index=place["output_index"], item=item)
        self._output.append(item)

    def voided(self, segment: Segment) -> None:
        """Say nothing: a call that cannot be read has not been emitted.

        OpenAI's client raises an error when a response is completed without an item that had begun, which is why
        no call begins before it is known to be one.
        """

    def _place(self, segment: Segment) -> dict[str, Any]:
        # One segment is open at a time, so it will stand behind those that the response has.
        return {"item_id": self._item_id(segment), "output_index": len(self._output)}

    def _item(self, segment: Segment, status: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        common = {"id": self._item_id(segment), "status": status}
        match segment.kind:
            case "text":
                return {**common, "type": "message", "role": "assistant", "content": list(parts)}
            case "reasoning":
                return {**common, "type": "reasoning", "summary": [], "content": list(parts)}
            case "call":
                call = {"call_id": segment.call_id, "name": segment.name}
                return {
                    **common,
                    "type": "function_call",
                    **call,
                    "arguments": "" if not parts else segment.text,
                }

    def _item_id(self, segment: Segment) -> str:
        return f"{_ITEM_PREFIXES[segment.kind]}_{self._item_suffix}{segment.index:04x}"

    def _emit_start(self) -> None:
        for kind in ("response.created", "response.in_progress"):
            self._emit(kind, response={**self.response, "output": []})

    def _emit_added(self, segment: Segment) -> None:
        item = self._item(segment, "in_progress", ())
        self._emit("response.output_item.added", output_index=len(self._output), item=item)

    def _emit_part(self, what: str, segment: Segment, part: dict[str, Any]) -> None:
        self._emit(
            f"response.content_part.{what}",
            **self._place(segment),
            content_index=0,
            part=part,
        )

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append(event({"type": kind, "sequence_number": self._sequence, **fields}, kind))
        self._sequence += 1

    def _taken(self) -> bytes:
        events = b"".join(self._events)
        self._events.clear()
        return events


def _part(segment: Segment, text: str, logprobs: Logprobs) -> dict[str, Any]:
    if segment.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _begun(request: ResponsesRequest, model: str, response_id: str, created_at: int) -> dict[str, Any]:
    """Return a response without output, with the settings of the request as OpenAI repeats them."""
    text = msgspec.to_builtins(request.text) if request.text is not None else {}
    reasoning = msgspec.to_builtins(request.reasoning) if request.reasoning is not None else {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        **{name: getattr(request, name) for name in _ECHOED},
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "top_logprobs": request.top_logprobs or 0,
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "truncation": request.truncation or "disabled",
        "store": request.store is not False,
        "background": False,
        "service_tier": "default",
        "usage": None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
