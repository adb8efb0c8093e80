"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`, Anthropic's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from nbengine.server.protocol.engine_fields import EngineFields


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A text."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """The model's reasoning; nothing is made of the signature."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only the model that wrote it can read; it is left out."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model has made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """The result of a call."""

    tool_use_id: str
    content: str | list[TextBlock | SearchResultBlock | DocumentBlock] | None = None
    is_error: bool | None = None


class SearchResultBlock(msgspec.Struct, tag_field="type", tag="search_result"):
    """A text that a search has found."""

    content: list[TextBlock]
    source: str
    title: str


class PlainTextSource(msgspec.Struct, tag_field="type", tag="text"):
    """The text of a document."""

    data: str


class ContentSource(msgspec.Struct, tag_field="type", tag="content"):
    """The text of a document, or its parts."""

    content: str | list[TextBlock]


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """A document of plain text."""

    source: PlainTextSource | ContentSource
    title: str | None = None
    context: str | None = None


class MidSystemBlock(msgspec.Struct, tag_field="type", tag="mid_conv_system"):
    """An instruction in the middle of a conversation."""

    content: list[TextBlock]


ContentBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | SearchResultBlock
    | DocumentBlock
    | MidSystemBlock
)


class InputMessage(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolParam(msgspec.Struct):
    """A tool that the model may call; `type` is None or "custom" for one that the caller carries out."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """The field `thinking`."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class JsonFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """The format of an answer that follows a schema."""

    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """The field `output_config`."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountTokensRequest(EngineFields, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: the fields that the prompt depends on."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    mcp_servers: list[dict[str, Any]] | None = None
