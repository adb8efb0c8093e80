"""The translation of a body of Anthropic's `/v1/messages` to one of `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from nbengine.server.protocol.engine_fields import given_fields
from nbengine.server.protocol.errors import ApiError, bad_request
from nbengine.server.protocol.messages import (
    ContentBlock,
    ContentSource,
    CountTokensRequest,
    DocumentBlock,
    InputMessage,
    MessagesRequest,
    MidSystemBlock,
    PlainTextSource,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolParam,
    ToolResultBlock,
    ToolUseBlock,
)
from nbengine.server.translate.conversation import ChatMessage, not_offered, with_one_beginning

CHAT_NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_budget": "thinking.budget_tokens",
}
"""The names of Chat Completions' fields, as an error is to have them for this API."""

_SAME_NAMES = ("temperature", "top_p", "top_k")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = {"max": "xhigh"}
"""The word of Chat Completions for an effort, where it has another one."""


def chat_body(request: MessagesRequest) -> dict[str, Any]:
    """Translate a request to the body of Chat Completions, in which absent fields stay absent.

    Raises:
        ApiError: a block or a tool is of a kind that is not available, or in a place where it means nothing.
    """
    for name in ("container", "mcp_servers"):
        if getattr(request, name):
            raise not_offered(name, f"{name} is not available: this server has no tools of its own")
    # With 0 the prompt alone is to be read; the one token that the engine makes is dropped.
    body = prompt_body(request) | {"max_completion_tokens": request.max_tokens or 1}
    for name in _SAME_NAMES:
        if getattr(request, name) is not None:
            body[name] = getattr(request, name)
    if request.stream:
        body["stream"] = True
    if request.stop_sequences:
        body["stop"] = request.stop_sequences
    thinking = request.thinking
    if thinking is not None and thinking.type == "enabled" and thinking.budget_tokens is not None:
        body["thinking_budget"] = thinking.budget_tokens
    config = request.output_config
    if config is not None and config.format is not None:
        schema = {"name": "answer", "schema": config.format.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def prompt_body(request: CountTokensRequest) -> dict[str, Any]:
    """Translate the fields that the prompt depends on."""
    messages = [*_system(request.system)]
    for index, message in enumerate(request.messages):
        messages += _chat_messages(message, messages, f"messages[{index}]")
    body: dict[str, Any] = {"model": request.model, "messages": with_one_beginning(messages)}
    body |= given_fields(request)
    # Anthropic's models do not think unless they are told to.
    thinks = request.thinking is not None and request.thinking.type != "disabled"
    body["chat_template_kwargs"] = {"enable_thinking": thinks, **(request.chat_template_kwargs or {})}
    if request.output_config is not None and (effort := request.output_config.effort) is not None:
        body["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if request.tools:
        body["tools"] = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools)]
    if request.tool_choice is not None:
        body |= _tool_choice(request.tool_choice)
    if request.messages and request.messages[-1].role == "assistant":
        # The answer is to go on where this message ends.
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _system(system: str | list[TextBlock] | None) -> list[ChatMessage]:
    if system is None:
        return []
    text = system if isinstance(system, str) else "\n\n".join(block.text for block in system)
    return [{"role": "system", "content": text}]


def _chat_messages(message: InputMessage, earlier: Sequence[ChatMessage], param: str) -> list[ChatMessage]:
    """Translate one message: results of calls are messages of their own in Chat Completions."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, param)]
    found: list[ChatMessage] = []
    texts: list[str] = []

    def end_text() -> None:
        if texts:
            found.append({"role": message.role, "content": "\n".join(texts)})
            texts.clear()

    for place, block in enumerate(message.content):
        match block:
            case TextBlock() | SearchResultBlock() | DocumentBlock():
                texts.append(_text(block))
            case ToolResultBlock():
                end_text()
                found.append(_result(block, earlier))
            case MidSystemBlock(content=blocks):
                end_text()
                found += _system(blocks)
            case _:
                raise _misplaced(block, f"{param}.content[{place}]", message.role)
    end_text()
    return found or [{"role": message.role, "content": ""}]


def _assistant(blocks: Sequence[ContentBlock], param: str) -> ChatMessage:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                texts.append(text)
            case ThinkingBlock(thinking=thinking):
                thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass  # Only the model that wrote it could read it.
            case ToolUseBlock(id=call_id, name=name, input=arguments):
                function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _misplaced(block, f"{param}.content[{place}]", "assistant")
    message: ChatMessage = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _result(block: ToolResultBlock, earlier: Sequence[ChatMessage]) -> ChatMessage:
    content = block.content
    text = content if isinstance(content, str) else "\n".join(map(_text, content or ()))
    if block.is_error:
        # Chat Completions has no field that says so, and the model has to know.
        text = f"Error: {text}"
    result: ChatMessage = {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    calls = [call for message in earlier for call in message.get("tool_calls", ())]
    names = [call["function"]["name"] for call in calls if call["id"] == block.tool_use_id]
    return result | {"name": names[-1]} if names else result


def _text(block: TextBlock | SearchResultBlock | DocumentBlock) -> str:
    match block:
        case TextBlock(text=text):
            return text
        case SearchResultBlock(content=blocks, source=source, title=title):
            return "\n".join([f"{title} ({source})", *[part.text for part in blocks]])
        case DocumentBlock(source=PlainTextSource(data=text)):
            pass
        case DocumentBlock(source=ContentSource() as source):
            content = source.content
            text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    return "\n".join(filter(None, (block.title, block.context, text)))


def _misplaced(block: ContentBlock, param: str, role: str) -> ApiError:
    kind = block.__struct_config__.tag
    message = f"{param}: a message of the role {role} has no block of type {kind}"
    return bad_request(message, param, "invalid_value")


def _chat_tool(tool: ToolParam, param: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"{param}.type must be custom: this server has no tools of its own, got {tool.type!r:.100}"
        raise not_offered(f"{param}.type", message)
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if choice.disable_parallel_tool_use is not None:
        found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return found | {"tool_choice": _CHOICES[choice.type]}
    if choice.name is None:
        message = "tool_choice.name must be the name of a tool where type is tool"
        raise bad_request(message, "tool_choice.name", "invalid_value")
    return found | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
