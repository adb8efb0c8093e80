"""Conversations: checking messages and rendering them with the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbengine.errors import InvalidArgumentError, InvalidTypeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]


def has_chat_template(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether conversations can be rendered without a template of the caller's."""
    return bool(tokenizer.chat_template)


def render_chat(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Render a conversation to a prompt: a dict with "prompt" and "prompt_token_ids".

    The template writes the special tokens itself, so that none are added when its text is tokenized.

    Raises:
        InvalidArgumentError: a message is malformed, there is no template, or the template refuses the messages.
    """
    if chat_template is None and not has_chat_template(tokenizer):
        raise InvalidArgumentError(
            "chat_template", None, "given, because this model has none (or use generate with a plain prompt)"
        )
    conversation = [_checked(message, index) for index, message in enumerate(_as_sequence(messages))]
    if not conversation:
        raise InvalidArgumentError("messages", [], "at least one message")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            **(chat_template_kwargs or {}),
        )
    except (TemplateError, TypeError) as error:
        raise InvalidArgumentError(
            "messages", conversation, f"accepted by the chat template ({error})"
        ) from error
    token_ids = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return {"prompt": text, "prompt_token_ids": token_ids}


def is_conversation(messages: object) -> bool:
    """Whether `messages` is one conversation, as opposed to a list of them."""
    return isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)


def _as_sequence(messages: object) -> Sequence[object]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidTypeError("messages", messages, 'a list of {"role": ..., "content": ...}')
    return messages


def _checked(message: object, index: int) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidTypeError(name, message, 'a dict with "role" and "content"')
    role = message.get("role")
    if role not in ROLES:
        raise InvalidArgumentError(f"{name}['role']", role, "one of " + ", ".join(ROLES))
    content = message.get("content")
    if content is None and not (role == "assistant" and message.get("tool_calls")):
        raise InvalidArgumentError(f"{name}['content']", content, "a string or a list of text parts")
    return {**message, "content": _text_of(content, f"{name}['content']")}


def _text_of(content: object, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidTypeError(name, content, "a string or a list of text parts")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidArgumentError(
                name, part, 'a string, or parts of the form {"type": "text", "text": ...}'
            )
        texts.append(text)
    return "\n".join(texts)
