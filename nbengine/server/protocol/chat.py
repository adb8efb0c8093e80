"""The body of `POST /v1/chat/completions`, and the parts of its stream."""

from __future__ import annotations

from typing import Any

import msgspec

from nbengine.outputs import Logprob, UnreadableCall
from nbengine.server.protocol.fields import SamplingFields


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """The body. Messages and tools are checked where they are rendered, so that an error names the message."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None

    # Accepted, and without a meaning here.
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None

    # Fields that OpenAI's API does not have.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    """Part of a call: its name comes first."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """Part of a call in a chunk."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class VoidCall(UnreadableCall, frozen=True, gc=False, omit_defaults=True):
    """A call that cannot be read; `index` is that of its deltas, None if there were none."""

    index: int | None = None


class Delta(msgspec.Struct, omit_defaults=True):
    """The new parts of a completion in a chunk."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    unreadable_tool_calls: list[VoidCall] | None = None


class ChunkChoice(msgspec.Struct):
    """One completion's part of a chunk."""

    index: int
    delta: Delta
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None


class UnusualChunkChoice(ChunkChoice, omit_defaults=True):
    """A part with what only some callers ask for."""

    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


class Chunk(msgspec.Struct):
    """A chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice]


class ChunkWithUsage(Chunk):
    """A chunk of a stream for which usage is wanted: the last one has it."""

    usage: dict[str, Any] | None = None


class ChunkOfPrompt(Chunk):
    """A chunk that comes before the answer and says how much of the prompt has been read."""

    prompt_progress: dict[str, int]
