"""The translation of a body of `/v1/chat/completions`: messages for the template, and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.frontend.parsing.json_text import read_object
from nbengine.sampling_params import SamplingParams
from nbengine.server.protocol.chat import ChatCompletionRequest
from nbengine.server.protocol.errors import bad_request
from nbengine.server.translate.sampling import sampling_params

MOST_TOP_LOGPROBS = 20
_UNAVAILABLE = {
    "audio": "answers are text",
    "functions": "give tools instead",
    "function_call": "give tool_choice instead",
    "web_search_options": "there is no web search",
}


def check_available(request: ChatCompletionRequest) -> None:
    """Raise the error for options that are not offered, and for those that contradict each other."""
    for name, reason in _UNAVAILABLE.items():
        if getattr(request, name):
            raise bad_request(f"{name} is not available: {reason}", name, "unsupported_parameter")
    if any(modality != "text" for modality in request.modalities or ()):
        raise bad_request("modalities must be ['text']: answers are text", "modalities", "unsupported_value")
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options are for a stream: set stream", "stream_options", "invalid_value")
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise bad_request("top_logprobs need logprobs to be true", "top_logprobs", "invalid_value")
        if not 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS:
            raise bad_request(
                f"top_logprobs must be in [0, {MOST_TOP_LOGPROBS}], got {request.top_logprobs}",
                "top_logprobs",
                "invalid_value",
            )


def chat_params(request: ChatCompletionRequest, recommended: Mapping[str, Any]) -> SamplingParams:
    """Make the sampling parameters; without a limit an answer may fill the model's context.

    Raises:
        ApiError, InvalidArgumentError: a field has a value that is not allowed.
    """
    limits = {request.max_completion_tokens, request.max_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            "max_tokens and max_completion_tokens are the same limit, and differ",
            "max_completion_tokens",
            "invalid_value",
        )
    return sampling_params(
        request,
        recommended,
        max_tokens=next(iter(limits), None),
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )


def template_messages(request: ChatCompletionRequest, template: str) -> list[dict[str, Any]]:
    """Return the messages as a template takes them: without fields that are null, as clients send back what
    they got; instructions of a `developer` are a `system`'s where the template knows only that. A call whose arguments
    are no JSON object, which a stream may have begun and cannot take back, is content, where its text stands already."""
    knows_developers = "developer" in template
    messages = []
    for message in request.messages:
        kept = {name: value for name, value in message.items() if value is not None}
        if kept.get("role") == "developer" and not knows_developers:
            kept["role"] = "system"
        if kept.get("role") == "assistant":
            _make_void_calls_content(kept)
            kept.setdefault("content", "")
            if not kept.get("tool_calls"):
                kept.pop("tool_calls", None)
        messages.append(kept)
    return messages


def _make_void_calls_content(message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return
    void = [arguments for call in calls if (arguments := _void_arguments(call))]
    if void:
        message["tool_calls"] = [call for call in calls if not _void_arguments(call)]
        message["content"] = message.get("content") or "\n".join(void)


def _void_arguments(call: object) -> str:
    """Return the arguments of a call if they are a text that is no JSON object, "" otherwise."""
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str) or not arguments or isinstance(read_object(arguments), dict):
        return ""
    return arguments


def render_options(request: ChatCompletionRequest) -> dict[str, Any]:
    """Return the further arguments of `render_chat`."""
    # Without an end of its own, the last message is what the answer goes on from.
    continued = bool(request.continue_final_message)
    wants_answer = request.add_generation_prompt
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
        if request.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return {
        "add_generation_prompt": not continued if wants_answer is None else wants_answer,
        "continue_final_message": continued,
        "chat_template": request.chat_template,
        "chat_template_kwargs": variables or None,
        "truncated": request.truncate_prompt_tokens is not None,
    }


def echoed_text(request: ChatCompletionRequest) -> str:
    """Return what `echo` puts before the answer: the last message, where the answer goes on from it."""
    if not (request.echo and request.continue_final_message and request.messages):
        return ""
    content = request.messages[-1].get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
