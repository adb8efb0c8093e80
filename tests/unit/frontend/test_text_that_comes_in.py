"""Whatever text comes in, whichever way: it is taken and can be sent, or the error names the argument and the place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from nbengine.checks import MAX_DEPTH, require_utf8, require_utf8_within
from nbengine.client import calls
from nbengine.errors import InvalidArgumentError, NBEngineError, NotSupportedError
from nbengine.frontend.requests.input_processor import InputProcessor
from nbengine.frontend.requests.prompt_length import LONG_TEXT, TextEncoder
from nbengine.frontend.text.chat import render_chat
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from tests.support.thorough import amount

HALF = "caf\ud83d"
USER = {"role": "user", "content": "the fox"}
PLACE = re.escape(r"'\ud83d' at position 3 is half of a surrogate pair")


def call_of(**arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("messages[0]['content']", {"messages": [{"role": "user", "content": HALF}]}),
        (
            "messages[0]['content'][0]['text']",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": HALF}]}]},
        ),
        ("messages[1]['role']", {"messages": [USER, {"role": HALF, "content": "x"}]}),
        ("messages[0]['name']", {"messages": [{**USER, "name": HALF}]}),
        ("messages[1]['tool_calls'][0]['function']['arguments']['a']", {"messages": [USER, call_of(a=HALF)]}),
        (
            "tools[0]['function']['description']",
            {"tools": [{"type": "function", "function": {"name": "f", "description": HALF}}]},
        ),
        ("chat_template", {"chat_template": HALF}),
        ("chat_template_kwargs", {"chat_template_kwargs": {HALF: 1}}),
        ("chat_template_kwargs['x']", {"chat_template_kwargs": {"x": HALF}}),
        ("prompt", {"chat_template": r"{{ 'caf\ud83d' }}"}),
    ],
)
def test_half_a_surrogate_pair_in_a_chat_is_named_with_its_place(
    tokenizer: PreTrainedTokenizerFast, name: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{re.escape(name)} must be .*{PLACE}"):
        render_chat(tokenizer, **{"messages": [USER], **arguments})


@pytest.mark.parametrize(
    ("name", "send"),
    [
        ("prompt", lambda ip: ip.process_inputs("r", HALF, SamplingParams())),
        ("prompt", lambda ip: ip.encoder.encode(HALF + "x" * LONG_TEXT)),
        ("prompt", lambda ip: ip.pooling.truncated(HALF, PoolingParams(truncate_prompt_tokens=2))),
        ("prompt", lambda ip: ip.pooling.paired("a", HALF, PoolingParams())),
        (
            "cache_salt",
            lambda ip: ip.process_inputs("r", {"prompt": "a", "cache_salt": HALF}, SamplingParams()),
        ),
        ("request_id", lambda ip: ip.process_inputs(HALF, "a", SamplingParams())),
        ("stop", lambda ip: SamplingParams(stop=HALF)),
        ("bad_words", lambda ip: SamplingParams(bad_words=[HALF])),
        ("extra_args['a'][0]", lambda ip: SamplingParams(extra_args={"a": [HALF]})),
        ("structured_outputs.choice", lambda ip: StructuredOutputsParams(choice=["a", HALF])),
        ("structured_outputs.regex", lambda ip: StructuredOutputsParams(regex=HALF)),
        ("structured_outputs.json['enum'][0]", lambda ip: StructuredOutputsParams(json={"enum": [HALF]})),
        ("structured_outputs.json", lambda ip: StructuredOutputsParams(json={HALF: 1})),
        ("directory", lambda ip: calls.start_profile.arguments(None, HALF)),
    ],
)
def test_half_a_surrogate_pair_is_named_wherever_text_comes_in(
    input_processor: InputProcessor, name: str, send: Callable[[InputProcessor], object]
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{re.escape(name)} must be .*{PLACE}"):
        send(input_processor)


def test_whole_pairs_and_control_characters_pass(input_processor: InputProcessor) -> None:
    text = "🙂\x00\x1b\u202e"
    request = input_processor.process_inputs(
        text, {"prompt": text, "cache_salt": text}, SamplingParams(stop=text, bad_words=[text])
    )
    assert MsgpackEncoder().encode(request)


def test_a_nested_value_that_never_ends_is_refused() -> None:
    circle: list[Any] = []
    circle += [circle, circle]
    with pytest.raises(InvalidArgumentError, match=f"messages must be at most {MAX_DEPTH}"):
        require_utf8_within("messages", [circle])


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_what_passes_the_check_can_be_tokenized_and_sent(text: str) -> None:
    require_utf8("text", text)
    assert TextEncoder(Tokenizer.from_str(TINY)).encode(text) is not None
    assert MsgpackEncoder().encode(text)


TINY = '{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}'
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
LEAVES = (
    TEXTS
    | st.binary(max_size=4)
    | st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 300).map(np.int64)
    | st.floats()
    | TEXTS.map(np.str_)
)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(LEAVES, inner, max_size=2),
    max_leaves=5,
)
CHAT_ARGUMENTS = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_content_format",
    "add_generation_prompt",
    "continue_final_message",
)


def answered_or_refused(call: Callable[[], object], *names: str) -> None:
    """Check that a call answers, or raises one error that names an argument."""
    message = names[0]
    try:
        call()
    except NBEngineError as error:
        message = str(error)
    assert any(name in message for name in names), message


@given(name=st.sampled_from(CHAT_ARGUMENTS), value=ANYTHING)
def test_whatever_a_chat_is_given_it_is_rendered_or_refused_by_name(
    shared_tokenizer: PreTrainedTokenizerFast, name: str, value: Any
) -> None:
    arguments: dict[str, Any] = {"messages": [USER], name: value}
    # A template of a few random characters is cheap, and rendered here.
    answered_or_refused(lambda: render_chat(shared_tokenizer, **arguments), name, "messages", "prompt")


@settings(max_examples=amount(30, thorough=2000))
@given(field=st.sampled_from(["role", "content", "name", "tool_calls"]), value=ANYTHING)
def test_whatever_a_message_has_it_is_rendered_or_refused_by_name(
    shared_tokenizer: PreTrainedTokenizerFast, field: str, value: Any
) -> None:
    message = {**USER, field: value}
    answered_or_refused(lambda: render_chat(shared_tokenizer, [message]), "messages", "prompt")


@settings(max_examples=amount(30, thorough=2000))
@given(kind=st.sampled_from([PoolingParams, StructuredOutputsParams]), data=st.data())
def test_whatever_parameters_are_given_they_can_be_sent_or_are_refused_by_name(
    kind: type, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(kind.__struct_fields__))
    value = data.draw(ANYTHING)
    answered_or_refused(lambda: MsgpackEncoder().encode(kind(**{name: value})), name, "structured_outputs")


@pytest.fixture(scope="module")
def shared_tokenizer() -> PreTrainedTokenizerFast:
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(TINY))
    made.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    return made


def test_a_part_that_is_no_text_is_still_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(NotSupportedError, match=r"messages\[0\]"):
        render_chat(tokenizer, [{"role": "user", "content": [{"type": "image"}]}])
