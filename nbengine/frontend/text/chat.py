"""Conversations: this module checks messages and renders them with the model's chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbengine.checks import one_of, require_bool, require_text, require_utf8_within
from nbengine.errors import (
    ChatTemplateError,
    InvalidArgumentError,
    InvalidTypeError,
    NotSupportedError,
    RequestError,
)
from nbengine.frontend.requests.prompt_length import PromptLimit, TextEncoder
from nbengine.frontend.text.quoting import QuotingEncoder
from nbengine.frontend.text.stored_templates import template_for
from nbengine.frontend.text.tools import Tool, tool_schemas
from nbengine.plain import as_mapping, plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPEAKERS = ("system", "developer", "user", "assistant")
"""The roles whose contents are texts; those of others, results of tools for instance, may be objects, which
templates write as JSON, or missing. Which roles there are is for the template to say."""
_VARIABLES = (
    "messages",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)
"""The names of what a template is rendered with beside `chat_template_kwargs`."""
CONTENT_FORMATS = ("auto", "string", "openai")
MEDIA_PARTS = ("image", "audio", "video", "file")
Message = Mapping[str, Any]

_ALLOWED_CONTENT = 'a string, or a list of parts {"type": "text", "text": ...}'


def has_chat_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether conversations can be rendered without a template from the caller."""
    return bool(tokenizer.chat_template)


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_content_format: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    encoder: QuotingEncoder | None = None,
    limit: PromptLimit | None = None,
) -> dict[str, Any]:
    """Render a conversation to a prompt: a dict with "prompt" and "prompt_token_ids".

    The template writes the special tokens itself, so that none are added when its text is tokenized. Those that
    a message spells stay text, but for messages of the model's own. A text that must have more tokens than `limit`
    is not tokenized. For the other arguments see `LLM.chat`.

    Raises:
        InvalidArgumentError: a message or a tool is malformed, there is no template, it fails with them, or
            the prompt is too long.
        ChatTemplateError: the template refuses them, which is an `InvalidArgumentError`, too.
        NotSupportedError: a message has an image or another part that is no text.
    """
    # These modules import jinja2.
    from nbengine.frontend.text.template_process import (
        TemplateCall,
        complaint_in,
        reason_of,
        render_template,
    )

    one_of("chat_template_content_format", chat_template_content_format, CONTENT_FORMATS)
    add_generation_prompt = require_bool("add_generation_prompt", add_generation_prompt)
    continue_final_message = require_bool("continue_final_message", continue_final_message)
    if chat_template is not None:
        require_text("chat_template", chat_template)
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise InvalidTypeError("chat_template_kwargs", chat_template_kwargs, "a dict, or None")
    for key in chat_template_kwargs or ():
        if not isinstance(key, str):
            raise InvalidTypeError("chat_template_kwargs", key, "a dict with strings as keys")
        if key in _VARIABLES:
            raise InvalidArgumentError(
                "chat_template_kwargs", key, f"without {', '.join(_VARIABLES)}, which are set otherwise"
            )
    if continue_final_message and add_generation_prompt:
        raise InvalidArgumentError(
            "continue_final_message", True, "False, unless add_generation_prompt is: both end the prompt"
        )
    schemas = None if tools is None else tool_schemas(tools)
    conversation = [_checked(message, index) for index, message in enumerate(_as_sequence(messages))]
    if not conversation:
        raise InvalidArgumentError("messages", [], "at least one message")
    texts = {"messages": conversation, "tools": schemas, "chat_template_kwargs": chat_template_kwargs}
    for name, value in texts.items():
        require_utf8_within(name, value)
    template = template_for(tokenizer.chat_template, chat_template, has_tools=bool(schemas))
    encoder = encoder or QuotingEncoder(TextEncoder(tokenizer.backend_tokenizer))
    try:
        messages = _formatted(encoder.quote(conversation), template, chat_template_content_format)
        variables = {**tokenizer.special_tokens_map, **(chat_template_kwargs or {})}
        text = render_template(
            TemplateCall(
                template, messages, schemas, variables, add_generation_prompt, continue_final_message
            )
        )
    except Exception as error:
        reason = str(error) if isinstance(error, RequestError) else reason_of(error)
        if (complaint := complaint_in(reason)) is not None:
            raise ChatTemplateError(conversation, *complaint) from error
        raise InvalidArgumentError(
            "messages", conversation, f"accepted by the chat template ({reason})"
        ) from error
    return {"prompt": encoder.unquoted(text), "prompt_token_ids": encoder.encode(text, limit)}


def is_conversation(messages: object) -> bool:
    """Return whether `messages` is one conversation, as opposed to a list of them."""
    return isinstance(messages, Sequence) and all(
        isinstance(as_mapping(message), Mapping) for message in messages
    )


def _as_sequence(messages: object) -> Sequence[object]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidTypeError("messages", messages, 'a list of {"role": ..., "content": ...}')
    return messages


def _checked(message: object, index: int) -> dict[str, Any]:
    """Copy a message, with its content a string or a list of text parts, and the arguments of its tool calls
    objects."""
    name = f"messages[{index}]"
    message = as_mapping(message)
    if not isinstance(message, Mapping):
        raise InvalidTypeError(name, message, 'a dict with "role" and "content"')
    role = plain(message.get("role"))
    if not isinstance(role, str):
        raise InvalidTypeError(f"{name}['role']", role, "a string: a role that the chat template knows")
    checked = {**message, "role": role}
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _checked_calls(calls, f"{name}['tool_calls']")
    content = message.get("content")
    if role in _SPEAKERS or not (content is None or isinstance(content, Mapping)):
        if content is None and role == "assistant" and _says_more(message):
            content = ""
        checked["content"] = _checked_content(content, f"{name}['content']")
    return checked


def _says_more(message: Mapping[str, Any]) -> bool:
    """Return whether a message has something beside its content: calls of tools, or reasoning."""
    return any(value for key, value in message.items() if key not in ("role", "content", "name"))


def _checked_content(content: object, name: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidTypeError(name, content, _ALLOWED_CONTENT)
    parts = []
    for part in map(as_mapping, content):
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and any(media in kind for media in MEDIA_PARTS):
            raise NotSupportedError(f"{name}: parts of type {kind!r} are not available; give text parts only")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise InvalidArgumentError(name, part, _ALLOWED_CONTENT)
        parts.append(dict(part))
    return parts


def _checked_calls(calls: object, name: str) -> list[dict[str, Any]]:
    allowed = 'a list of {"type": "function", "function": {"name": ..., "arguments": ...}}'
    if isinstance(calls, (str, Mapping)) or not isinstance(calls, Sequence):
        raise InvalidTypeError(name, calls, allowed)
    checked = []
    for call in map(as_mapping, calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidArgumentError(name, call, allowed)
        function = {**function, "arguments": _arguments(function.get("arguments"), name)}
        checked.append({**call, "function": function})
    return checked


def _arguments(arguments: object, name: str) -> dict[str, Any]:
    """Return the arguments of a tool call as a dict: templates want an object, chat services return its
    JSON."""
    parsed = arguments or {}
    if isinstance(parsed, str):
        try:
            parsed = json.loads(parsed)
        except ValueError:
            # Not JSON; the check below says what is wanted.
            parsed = None
    if not isinstance(parsed, Mapping):
        raise InvalidArgumentError(name, arguments, 'with "arguments" that are a dict, or a JSON object')
    return dict(parsed)


def _formatted(conversation: list[dict[str, Any]], template: str, wanted: str) -> list[dict[str, Any]]:
    """Return the messages with their content as the template takes it: text, or a list of parts."""
    if wanted == "openai":
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in conversation
        ]
    if wanted == "auto" and _reads_parts(template):
        return conversation
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation
    ]


@functools.lru_cache(maxsize=32)
def _reads_parts(template: str) -> bool:
    """Return whether a template loops over a message's content, also by way of a variable or a macro's
    argument."""
    from jinja2 import nodes

    from nbengine.frontend.text.template_cost import parse

    tree = parse(template)
    names = {
        assignment.target.name
        for assignment in tree.find_all(nodes.Assign)
        if isinstance(assignment.target, nodes.Name) and _is_content(assignment.node, frozenset())
    }
    macros = {macro.name: [argument.name for argument in macro.args] for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            for name, value in zip(macros.get(call.node.name, ()), call.args, strict=False):
                if _is_content(value, frozenset(names)):
                    names.add(name)
    return any(_is_content(loop.iter, frozenset(names)) for loop in tree.find_all(nodes.For))


def _is_content(node: Any, names: frozenset[str]) -> bool:
    from jinja2 import nodes

    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    if isinstance(node, nodes.Getattr):
        return bool(node.attr == "content")
    return isinstance(node, nodes.Name) and node.name in names
