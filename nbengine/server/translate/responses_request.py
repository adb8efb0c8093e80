"""The translation of a body of `/v1/responses` to one of `/v1/chat/completions`.

Both ask for one turn of a conversation, so that one translation leads to the engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from nbengine.server.protocol.engine_fields import given_fields
from nbengine.server.protocol.errors import bad_request
from nbengine.server.protocol.responses import (
    INPUT_ITEMS,
    AllowedTools,
    FunctionCallItem,
    FunctionCallOutputItem,
    FunctionTool,
    InputItem,
    JsonObjectFormat,
    JsonSchemaFormat,
    MessageItem,
    MessagePart,
    NamedFunction,
    ReasoningItem,
    RefusalPart,
    ResponsesRequest,
)
from nbengine.server.translate.conversation import ChatMessage, not_offered, with_one_beginning

T = TypeVar("T")

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""The names of Chat Completions' fields, as an error is to have them for this API."""

_SAME_NAMES = ("model", "temperature", "top_p", "top_k", "stop", "parallel_tool_calls", "user")
_UNAVAILABLE = {
    "background": "responses are made while the caller waits",
    "conversation": "send the conversation as input, or previous_response_id",
    "prompt": "stored prompts are not kept here",
    "moderation": "there is no moderation",
    "context_management": "conversations are not compacted here",
}


def chat_body(request: ResponsesRequest, conversation: Sequence[ChatMessage]) -> dict[str, Any]:
    """Translate a request to the body of Chat Completions, in which absent fields stay absent.

    Args:
        request: the decoded body.
        conversation: the messages before the answer, without instructions: `input_messages` of the request,
            behind those that belong to `previous_response_id`.

    Raises:
        ApiError: an item, a tool or an option is malformed, or of a kind that is not available.
    """
    for name, reason in _UNAVAILABLE.items():
        if getattr(request, name):
            raise not_offered(name, f"{name} is not available: {reason}")
    instructions = [] if request.instructions is None else [_system(request.instructions)]
    messages = [*instructions, *conversation]
    body: dict[str, Any] = {"messages": with_one_beginning(messages), **given_fields(request)}
    for name in _SAME_NAMES:
        if getattr(request, name) is not None:
            body[name] = getattr(request, name)
    if request.max_output_tokens is not None:
        body["max_completion_tokens"] = request.max_output_tokens
    if request.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if wants_logprobs(request):
        body["logprobs"] = True
        body["top_logprobs"] = request.top_logprobs or 0
    if request.stream:
        body["stream"] = True
    response_format = _response_format(request)
    if response_format is not None:
        body["response_format"] = response_format
    return body | _tools(request)


def wants_logprobs(request: ResponsesRequest) -> bool:
    """Tell whether the text of the answer is to carry the log probabilities of its tokens."""
    return bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())


def input_messages(
    given: str | list[dict[str, Any]], earlier: Sequence[ChatMessage] = ()
) -> list[ChatMessage]:
    """Translate the items of `input`, which follow the messages `earlier`, to messages.

    Reasoning, a text and the calls behind it are one message of the assistant, as templates expect it.

    Raises:
        ApiError: an item is malformed, or of a kind that is not available.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[ChatMessage] = []
    calls = [call for message in earlier for call in message.get("tool_calls", ())]
    names: dict[str, str] = {call["id"]: call["function"]["name"] for call in calls}
    for index, item in enumerate(given):
        match _input_item(item, f"input[{index}]"):
            case MessageItem(role="assistant", content=content):
                message = _assistant(messages, "content", "tool_calls")
                message["content"] = _text(content)
            case MessageItem(role="user", content=content):
                messages.append({"role": "user", "content": _text(content)})
            case MessageItem(content=content):
                messages.append(_system(_text(content)))
            case ReasoningItem() as reasoning:
                message = _assistant(messages, "reasoning_content", "content", "tool_calls")
                parts = reasoning.content or reasoning.summary
                message["reasoning_content"] = "\n".join(part.text for part in parts)
            case FunctionCallItem(call_id=call_id, name=name, arguments=arguments):
                _check_arguments(arguments, f"input[{index}].arguments")
                names[call_id] = name
                message = _assistant(messages)
                function = {"name": name, "arguments": arguments}
                call = {"id": call_id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem(call_id=call_id, output=output):
                result = {"role": "tool", "tool_call_id": call_id, "content": _text(output)}
                # Some templates show the function's name, which only its call has.
                messages.append(result | ({"name": names[call_id]} if call_id in names else {}))
    return [_complete(message) for message in messages]


def decoded(value: object, kind: type[T], param: str) -> T:
    """Check a part of a body and return it as `kind`.

    Raises:
        ApiError: the part is malformed; the error names `param` and the place in it.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise bad_request(f"{param}: {error}", param, "invalid_value") from error


def _input_item(item: dict[str, Any], param: str) -> InputItem:
    kind = item.get("type")
    if kind is None:
        kind = "message"
    found = INPUT_ITEMS.get(kind) if isinstance(kind, str) else None
    if found is None:
        allowed = ", ".join(INPUT_ITEMS)
        raise not_offered(f"{param}.type", f"{param}.type must be one of {allowed}, got {kind!r:.100}")
    return decoded(item, found, param)


def _check_arguments(arguments: str, param: str) -> None:
    try:
        is_object = isinstance(json.loads(arguments or "{}"), dict)
    except ValueError:
        is_object = False
    if not is_object:
        raise bad_request(f"{param} must be a JSON object, got {arguments!r:.100}", param, "invalid_value")


def _assistant(messages: list[ChatMessage], *filled: str) -> ChatMessage:
    """Return the last message if it is the assistant's and has nothing in `filled`, a new one otherwise."""
    if messages and messages[-1]["role"] == "assistant" and not any(name in messages[-1] for name in filled):
        return messages[-1]
    messages.append({"role": "assistant"})
    return messages[-1]


def _complete(message: ChatMessage) -> ChatMessage:
    return message if "content" in message else {**message, "content": ""}


def _system(text: str) -> ChatMessage:
    # "developer" is OpenAI's newer word for it, which few templates know.
    return {"role": "system", "content": text}


def _text(content: str | list[MessagePart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    match request.text and request.text.format:
        case JsonObjectFormat():
            return {"type": "json_object"}
        case JsonSchemaFormat() as wanted:
            schema: dict[str, Any] = {"name": wanted.name, "schema": wanted.schema}
            if wanted.description is not None:
                schema["description"] = wanted.description
            if wanted.strict is not None:
                schema["strict"] = wanted.strict
            return {"type": "json_schema", "json_schema": schema}
    return None


def _tools(request: ResponsesRequest) -> dict[str, Any]:
    tools = [_chat_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    choice: str | dict[str, Any] | None = None
    match request.tool_choice:
        case None | "none" | "auto" | "required":
            choice = request.tool_choice
        case {"type": "function"}:
            name = decoded(request.tool_choice, NamedFunction, "tool_choice").name
            choice = {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools"}:
            allowed = decoded(request.tool_choice, AllowedTools, "tool_choice")
            names = {decoded(tool, NamedFunction, "tool_choice.tools").name for tool in allowed.tools}
            tools = _chosen(tools, names)
            choice = allowed.mode
        case other:
            message = (
                f"tool_choice must be none, auto, required, a function or allowed_tools, got {other!r:.100}"
            )
            raise not_offered("tool_choice", message)
    found: dict[str, Any] = {"tools": tools} if tools else {}
    return found if choice is None else found | {"tool_choice": choice}


def _chosen(tools: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    """Return the tools of these names."""
    chosen = [tool for tool in tools if tool["function"]["name"] in names]
    unknown = names.difference(tool["function"]["name"] for tool in chosen)
    if unknown or not chosen:
        got = ", ".join(map(repr, sorted(unknown))) or "none"
        message = f"tool_choice.tools must have names of given tools, at least one, got {got:.200}"
        raise bad_request(message, "tool_choice.tools", "invalid_value")
    return chosen


def _chat_tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{param}.type must be function: this server has no tools of its own, got {tool.get('type')!r:.100}"
        raise not_offered(f"{param}.type", message)
    wanted = decoded(tool, FunctionTool, param)
    function: dict[str, Any] = {"name": wanted.name, "strict": wanted.strict is not False}
    if wanted.description is not None:
        function["description"] = wanted.description
    function["parameters"] = wanted.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
