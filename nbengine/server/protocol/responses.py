"""The body of `POST /v1/responses`.

The items of `input` and the tools are decoded one by one, by their `type`, so that an error names the item.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from nbengine.server.protocol.engine_fields import EngineFields

Role = Literal["user", "assistant", "system", "developer"]


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A text, as Chat Completions writes it."""

    text: str


class InputTextPart(msgspec.Struct, tag_field="type", tag="input_text"):
    """A text that somebody has written to the model."""

    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    """A text of the model."""

    text: str


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal of the model."""

    refusal: str


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """A part of the model's reasoning."""

    text: str


class SummaryTextPart(msgspec.Struct, tag_field="type", tag="summary_text"):
    """A part of a summary of the model's reasoning."""

    text: str


MessagePart = TextPart | InputTextPart | OutputTextPart | RefusalPart


class MessageItem(msgspec.Struct):
    """A message, with or without `"type": "message"`."""

    role: Role
    content: str | list[MessagePart]


class FunctionCallItem(msgspec.Struct):
    """A call that the model has made."""

    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(msgspec.Struct):
    """The result of a call."""

    call_id: str
    output: str | list[MessagePart]


class ReasoningItem(msgspec.Struct):
    """The model's reasoning before what follows."""

    summary: list[SummaryTextPart] = []
    content: list[ReasoningTextPart] | None = None


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
INPUT_ITEMS: dict[str, type[InputItem]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(msgspec.Struct):
    """A function that the model may call.

    `strict` defaults to True, as OpenAI documents it for this API.
    """

    name: str
    parameters: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct):
    """A function in `tool_choice`."""

    name: str


class AllowedTools(msgspec.Struct):
    """The tools among which `tool_choice` lets the model choose."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """The format of an answer that may be any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """The format of an answer that is any JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """The format of an answer that follows a schema."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """The field `text`."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(msgspec.Struct):
    """The field `reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(EngineFields, kw_only=True):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    include: list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None

    background: bool | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    moderation: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
