"""Chat messages: checks and rendering."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nbengine.errors import InvalidArgumentError, InvalidTypeError, NotSupportedError
from nbengine.frontend.text.chat import has_chat_template, is_conversation, render_chat

HELLO = [{"role": "user", "content": "the fox"}]


def test_rendering_uses_the_template_and_adds_no_special_tokens_of_its_own(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    prompt = render_chat(tokenizer, HELLO)
    assert prompt["prompt"] == "<|user|>the fox<|assistant|>"
    expected = tokenizer.apply_chat_template(
        HELLO, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert prompt["prompt_token_ids"] == expected
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    assert (prompt["prompt_token_ids"][0], prompt["prompt_token_ids"][-1]) == (user, assistant)


def test_options_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert render_chat(tokenizer, HELLO, add_generation_prompt=False)["prompt"] == "<|user|>the fox"
    prompt = render_chat(
        tokenizer,
        HELLO,
        chat_template="{{ messages[0]['content'] }}{{ mark }}",
        chat_template_kwargs={"mark": "!"},
    )
    assert prompt["prompt"] == "the fox!"


def test_text_parts_are_joined(tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]
    assert render_chat(tokenizer, [{"role": "user", "content": parts}])["prompt"].startswith(
        "<|user|>the\nfox"
    )


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hello", r"messages must be a list"),
        ({"role": "user", "content": "x"}, r"messages must be a list"),
        (["hello"], r"messages\[0\] must be a dict"),
        ([*HELLO, {"role": 5, "content": "x"}], r"messages\[1\]\['role'\] must be a string.*, got 5"),
        ([{"content": "x"}], r"messages\[0\]\['role'\].*got None"),
        ([{"role": "user"}], r"messages\[0\]\['content'\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] must be a string"),
        (
            [{"role": "user", "content": [{"type": "thought", "text": "x"}]}],
            r"messages\[0\]\['content'\] must be a string, or a list of parts.*thought",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\['content'\]"),
        ([{"role": "assistant", "content": None}], r"messages\[0\]\['content'\]"),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\]\['tool_calls'\] must be a list"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], r"\['tool_calls'\] must be a list"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r'\["tool_calls"\]|\[.tool_calls.\] must be with "arguments" that are',
        ),
        ([{"role": "tool", "content": "x"}], "no tools here"),
    ],
)
def test_wrong_messages_are_named(tokenizer: PreTrainedTokenizerFast, messages: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        render_chat(tokenizer, messages)


def test_a_model_without_a_template_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    assert has_chat_template(tokenizer)
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert not has_chat_template(bare)
    with pytest.raises(InvalidArgumentError, match="this model has none"):
        render_chat(bare, HELLO)
    assert render_chat(bare, HELLO, chat_template="{{ messages[0]['content'] }}")["prompt"] == "the fox"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video_url", "file"])
def test_parts_that_are_no_text_are_not_supported(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": kind, kind: "x"}]}]
    with pytest.raises(NotSupportedError, match=rf"messages\[0\]\['content'\]: parts of type '{kind}'"):
        render_chat(tokenizer, messages)


def test_options_that_do_not_go_together_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidArgumentError, match="continue_final_message must be False"):
        render_chat(tokenizer, HELLO, continue_final_message=True)
    with pytest.raises(
        InvalidArgumentError, match="chat_template_content_format must be one of auto, string"
    ):
        render_chat(tokenizer, HELLO, chat_template_content_format="parts")


def test_whatever_a_template_raises_is_an_error_of_the_messages(tokenizer: PreTrainedTokenizerFast) -> None:
    for template in ("{{ 1 / 0 }}", "{{ nothing.there }}", "{% if %}", "{{ messages[0]['content'] + 1 }}"):
        with pytest.raises(InvalidArgumentError, match="messages must be accepted by the chat template"):
            render_chat(tokenizer, HELLO, chat_template=template)


def test_the_callers_messages_stay_as_they_are(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    render_chat(tokenizer, messages, chat_template="{{ messages[1].tool_calls[0].function.arguments.x }}")
    assert messages == before


def test_one_conversation_is_told_from_several() -> None:
    assert is_conversation(HELLO)
    assert not is_conversation([HELLO, HELLO])


def test_a_conversation_has_to_be_a_list(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidTypeError):
        render_chat(tokenizer, 5)  # type: ignore[arg-type]
