"""Chat messages: checks and rendering."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.chat import has_chat_template, is_conversation, render_chat

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
        (
            [*HELLO, {"role": "robot", "content": "x"}],
            r"messages\[1\]\['role'\] must be one of system.*'robot'",
        ),
        ([{"content": "x"}], r"messages\[0\]\['role'\].*got None"),
        ([{"role": "user"}], r"messages\[0\]\['content'\]"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\['content'\] must be a string"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "x"}]}],
            r"messages\[0\]\['content'\].*image",
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


def test_one_conversation_is_told_from_several() -> None:
    assert is_conversation(HELLO)
    assert not is_conversation([HELLO, HELLO])


def test_a_conversation_has_to_be_a_list(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(InvalidTypeError):
        render_chat(tokenizer, 5)  # type: ignore[arg-type]
