"""The chat template decides which roles there are and what their contents look like, and refuses in its own words."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from nbengine.errors import ChatTemplateError, InvalidArgumentError
from nbengine.frontend.text.chat import is_conversation, render_chat
from nbengine.server.protocol.errors import api_error_of

ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else m.content | tojson }}{% endfor %}"


@dataclass
class Said:
    role: str
    content: str


@dataclass
class Part:
    type: str
    text: str


USER = {"role": "user", "content": "the fox"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "ipython", "content": "42"},
        {"role": "observation", "content": "42"},
        {"role": "function", "name": "f", "content": "42"},
        {"role": "ipython", "content": {"output": 42}},
        {"role": "tool", "content": {"output": [1, 2]}},
    ],
)
def test_messages_of_any_role_are_rendered_as_transformers_renders_them(
    tokenizer: PreTrainedTokenizerFast, message: dict[str, Any]
) -> None:
    messages = [USER, message]
    (wanted,), _ = render_jinja_template(conversations=[messages], chat_template=ANY_ROLE)
    assert render_chat(tokenizer, messages, chat_template=ANY_ROLE)["prompt"] == wanted


def test_a_message_without_content_is_the_templates_affair(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.tools }}{{ m.thinking }}{{ m.content }}{% endfor %}"
    messages = [{"role": "tools", "tools": "T"}, {"role": "assistant", "thinking": "H"}]
    assert render_chat(tokenizer, messages, chat_template=template)["prompt"] == "toolsTassistantH"


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
def test_who_speaks_says_text(tokenizer: PreTrainedTokenizerFast, role: str) -> None:
    for content in (None, {"text": "x"}, 5):
        with pytest.raises(InvalidArgumentError, match=r"messages\[0\]\['content'\]"):
            render_chat(tokenizer, [{"role": role, "content": content}], chat_template=ANY_ROLE)


@pytest.mark.parametrize("cheap", [True, False])
def test_the_templates_own_complaint_is_the_message(tokenizer: PreTrainedTokenizerFast, cheap: bool) -> None:
    template = "\n{{ raise_exception('after user comes assistant,\nnot user') }}"
    # The product makes it one that is rendered in the process with limits.
    text = template if cheap else template + "{{ 'x' * 3 }}"
    with pytest.raises(ChatTemplateError) as raised:
        render_chat(tokenizer, [USER, USER], chat_template=text)
    error = raised.value
    assert str(error).endswith("by the chat template, line 2: after user comes assistant,\nnot user")
    assert (error.argument, error.complaint) == ("messages", "after user comes assistant,\nnot user")
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.place) == (str(error), "line 2")
    answered = api_error_of(error)
    assert (answered.status, answered.param) == (400, "messages")
    assert "after user comes assistant" in answered.message


def test_a_template_that_fails_is_not_quoted_as_if_it_complained(tokenizer: PreTrainedTokenizerFast) -> None:
    for template in ("{{ nothing.there }}", "{% if %}"):
        with pytest.raises(InvalidArgumentError, match="accepted by the chat template") as raised:
            render_chat(tokenizer, [USER], chat_template=template)
        assert not isinstance(raised.value, ChatTemplateError)


def test_messages_calls_and_parts_may_be_objects_of_those_who_describe_them(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """People append `response.choices[0].message` to their messages."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "content": "yes", "tool_calls": [call]}
    calls = ChatCompletionMessage.model_validate(said).tool_calls
    template = "{% for m in messages %}{{ m | tojson(sort_keys=true) }}{% endfor %}"

    def rendered(*messages: Any) -> str:
        return str(render_chat(tokenizer, [USER, *messages], chat_template=template)["prompt"])

    wanted = rendered(said)
    assert "null" not in wanted
    assert rendered(ChatCompletionMessage.model_validate(said)) == wanted
    assert rendered({**said, "tool_calls": calls}) == wanted
    assert rendered({**said, "content": [Part("text", "yes")]}) == wanted
    assert rendered(Said("user", "the fox")) == rendered(USER)
    assert is_conversation([USER, Said("user", "the fox")])
    with pytest.raises(InvalidArgumentError, match=r"messages\[1\] must be a dict"):
        rendered(object())


@pytest.mark.parametrize(
    "name", ["messages", "tools", "chat_template", "conversations", "continue_final_message"]
)
def test_variables_of_a_template_that_are_set_otherwise_are_refused_by_name(
    tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    with pytest.raises(
        InvalidArgumentError, match=rf"^chat_template_kwargs must be without .*{name}.*got '{name}'"
    ):
        render_chat(tokenizer, [USER], chat_template_kwargs={name: []})
