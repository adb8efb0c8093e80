"""An answer as `/v1/chat/completions` gives it: the chunks of a stream, or the whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nbengine.frontend.parsing.deltas import (
    AnswerDelta,
    ArgumentsDelta,
    ContentDelta,
    MalformedCall,
    ReasoningDelta,
    ToolCallEnded,
    ToolCallStarted,
)
from nbengine.outputs import Logprob
from nbengine.server.events import HOLE, Frame, event
from nbengine.server.protocol.chat import (
    Chunk,
    ChunkChoice,
    ChunkOfPrompt,
    ChunkWithUsage,
    Delta,
    FunctionDelta,
    ToolCallDelta,
    UnusualChunkChoice,
    VoidCall,
)
from nbengine.server.translate.answers import AnswerPart
from nbengine.server.translate.content_logprobs import Entry
from nbengine.server.translate.logprobs import chat_logprobs
from nbengine.server.translate.usage import Usage, prompt_progress


@dataclass(frozen=True, slots=True)
class ChatForm:
    """The form of an answer: what its parts share, and what its caller wants to see."""

    id: str
    created: int
    model: str
    top_logprobs: int | None = None
    """None: log probabilities are not wanted."""
    usage_chunk: bool = False
    running_usage: bool = False
    token_ids: bool = False
    reasoning: bool = True
    echo: str = ""
    """A text before each completion."""


class ChatChunks:
    """The state machine that makes the chunks of a stream, encoded as events."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._begun: set[int] = set()
        self._frames: dict[int, Frame] = {}
        """The chunks of content alone, for each completion."""
        self._is_plain = form.top_logprobs is None and not (form.running_usage or form.token_ids)

    def add(self, part: AnswerPart, usage: Usage | None = None) -> list[bytes]:
        """Return the chunks for a part; `usage` is that so far, where each chunk has it."""
        if self._is_plain and part.finish_reason is None and part.index in self._begun:
            deltas = part.deltas
            if len(deltas) == 1 and isinstance(deltas[0], ContentDelta):
                frame = self._frames.get(part.index)
                if frame is None:
                    chunk = self._chunk([ChunkChoice(part.index, Delta(content=HOLE))], None)
                    frame = self._frames[part.index] = Frame(chunk)
                return [frame.event(deltas[0].text)]
        return [event(chunk) for chunk in self._chunks(part, usage)]

    def _chunks(self, part: AnswerPart, usage: Usage | None) -> list[Chunk]:
        if part.prompt_progress is not None:
            choices = [ChunkChoice(part.index, Delta())]
            return [ChunkOfPrompt(*self._head(choices), prompt_progress(part.prompt_progress))]
        chunks = []
        if part.index not in self._begun:
            self._begun.add(part.index)
            opening = Delta(role="assistant", content=self._form.echo)
            first = ChunkChoice(part.index, opening)
            if part.prompt_logprobs is not None:
                first = UnusualChunkChoice(part.index, opening, prompt_logprobs=part.prompt_logprobs)
            chunks.append(self._chunk([first], usage))
        delta = delta_of(part.deltas, reasoning=self._form.reasoning)
        top = self._form.top_logprobs
        logprobs = None
        if top is not None and (entries := _of_content(part)):
            logprobs = {"content": chat_logprobs(entries, top), "refusal": None}
        if delta is not None or logprobs is not None or part.finish_reason or self._form.token_ids:
            chunks.append(self._chunk([self._choice(part, delta or Delta(), logprobs)], usage))
        return chunks

    def _choice(self, part: AnswerPart, delta: Delta, logprobs: dict[str, Any] | None) -> ChunkChoice:
        if part.stop_reason is None and not self._form.token_ids:
            return ChunkChoice(part.index, delta, logprobs, part.finish_reason)
        token_ids = part.token_ids if self._form.token_ids else None
        return UnusualChunkChoice(
            part.index, delta, logprobs, part.finish_reason, part.stop_reason, token_ids
        )

    def end(self, usage: Usage) -> list[bytes]:
        """Return the last chunk, if usage is wanted."""
        return [event(self._chunk([], usage))] if self._form.usage_chunk else []

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None) -> Chunk:
        if not self._form.usage_chunk:
            return Chunk(*self._head(choices))
        return ChunkWithUsage(*self._head(choices), None if usage is None else usage.openai())

    def _head(self, choices: list[ChunkChoice]) -> tuple[str, str, int, str, list[ChunkChoice]]:
        return self._form.id, "chat.completion.chunk", self._form.created, self._form.model, choices


def delta_of(deltas: Iterable[AnswerDelta], *, reasoning: bool = True) -> Delta | None:
    """Return what a chunk has of parts of an answer; None if there is nothing.

    A call that turns out malformed comes as content, and with the reason. What was streamed of its arguments cannot be
    taken back, so that its index comes, too.
    """
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCallDelta] = []
    unreadable: list[VoidCall] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text=text):
                content.append(text)
            case MalformedCall(text=text, reason=reason, index=index):
                content.append(text)
                unreadable.append(VoidCall(text, reason, index))
            case ReasoningDelta(text=text):
                thoughts.append(text)
            case ToolCallStarted(index=index, id=call_id, name=name):
                calls.append(ToolCallDelta(index, call_id, "function", FunctionDelta(name, "")))
            case ArgumentsDelta(index=index, text=text):
                calls.append(ToolCallDelta(index, function=FunctionDelta(arguments=text)))
            case ToolCallEnded():
                pass
    if not reasoning:
        thoughts = []
    if not (content or thoughts or calls):
        return None
    return Delta(
        content="".join(content) if content else None,
        reasoning_content="".join(thoughts) if thoughts else None,
        tool_calls=calls or None,
        unreadable_tool_calls=unreadable or None,
    )


def _of_content(part: AnswerPart) -> list[Entry]:
    return [entry for entries in part.content_logprobs or () for entry in entries]


class _Message:
    """One completion as a whole."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: dict[int, dict[str, Any]] = {}
        self.unreadable: list[dict[str, str]] = []
        self.logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, delta: AnswerDelta) -> None:
        match delta:
            case ContentDelta(text=text):
                self.content.append(text)
            case MalformedCall(text=text, reason=reason, index=index):
                self.content.append(text)
                self.unreadable.append({"text": text, "reason": reason})
                if index is not None:
                    self.calls.pop(index, None)
            case ReasoningDelta(text=text):
                self.reasoning.append(text)
            case ToolCallStarted(index=index, id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                self.calls[index] = {"id": call_id, "type": "function", "function": function}
            case ArgumentsDelta(index=index, text=text):
                if index in self.calls:
                    self.calls[index]["function"]["arguments"] += text
            case ToolCallEnded():
                pass


class ChatCompletion:
    """The builder of an answer as a whole."""

    def __init__(self, form: ChatForm) -> None:
        self._form = form
        self._messages: dict[int, _Message] = {}

    def add(self, part: AnswerPart) -> None:
        """Take in a part."""
        message = self._messages.setdefault(part.index, _Message())
        for delta in part.deltas:
            message.add(delta)
        if self._form.top_logprobs is not None:
            message.logprobs += chat_logprobs(_of_content(part), self._form.top_logprobs)
        message.token_ids += part.token_ids
        message.finish_reason = part.finish_reason or message.finish_reason
        message.stop_reason = part.stop_reason if part.stop_reason is not None else message.stop_reason
        message.prompt_logprobs = message.prompt_logprobs or part.prompt_logprobs

    def response(self, usage: Usage) -> dict[str, Any]:
        """Return the body of the response."""
        form = self._form
        return {
            "id": form.id,
            "object": "chat.completion",
            "created": form.created,
            "model": form.model,
            "choices": [self._choice(index) for index in sorted(self._messages)],
            "usage": usage.openai(),
        }

    def _choice(self, index: int) -> dict[str, Any]:
        message, form = self._messages[index], self._form
        text = form.echo + "".join(message.content)
        body: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not message.calls else None,
            "refusal": None,
        }
        if message.reasoning and form.reasoning:
            body["reasoning_content"] = "".join(message.reasoning)
        if message.calls:
            body["tool_calls"] = [message.calls[number] for number in sorted(message.calls)]
        if message.unreadable:
            body["unreadable_tool_calls"] = message.unreadable
        choice: dict[str, Any] = {
            "index": index,
            "message": body,
            "logprobs": None if form.top_logprobs is None else {"content": message.logprobs, "refusal": None},
            "finish_reason": message.finish_reason,
            "stop_reason": message.stop_reason,
        }
        if form.token_ids:
            choice["token_ids"] = message.token_ids
        if message.prompt_logprobs is not None:
            choice["prompt_logprobs"] = message.prompt_logprobs
        return choice
