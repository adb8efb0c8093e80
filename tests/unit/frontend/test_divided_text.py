"""Outputs have the reasoning, the content and the calls of a text whose format is known."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from nbengine.errors import InvalidArgumentError, InvalidTypeError
from nbengine.frontend.outputs.output_processor import OutputProcessor
from nbengine.frontend.parsing.answer_parser import AnswerReading
from nbengine.frontend.parsing.formats import AnswerFormat
from nbengine.frontend.parsing.reading import answer_of
from nbengine.frontend.requests.prompt_length import PromptLimit, TextEncoder
from nbengine.frontend.requests.prompting import Prompting
from nbengine.frontend.text.decoding import TextDecoding
from nbengine.frontend.text.quoting import QuotingEncoder
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from nbengine.outputs import CompletionOutput, RequestOutput
from nbengine.sampling_params import RequestOutputKind, SamplingParams

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
CALL = '{"name": "now", "arguments": {"zone": "UTC"}}'
TEXT = f"<think>\nhm, é\n</think>\n\nI look.\n<tool_call>\n{CALL}\n</tool_call>"
READING = AnswerReading(AnswerFormat("qwen3", "hermes"))
NOW = {
    "type": "function",
    "function": {"name": "now", "description": "Tell the time.", "parameters": {"type": "object"}},
}
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | length }}</tool_call>{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "<|assistant|>{% if enable_thinking %}<think>\n{% endif %}{# closed by </think> #}"
)


def outputs_of(
    tokenizer: Tokenizer,
    text: str,
    reading: AnswerReading | None,
    finish: FinishReason = FinishReason.STOP,
    **params: Any,
) -> list[RequestOutput]:
    """Send a text token by token to all completions of a request, and return its outputs."""
    sampling = SamplingParams(max_tokens=None, **params)
    processor = OutputProcessor(TextDecoding(tokenizer))
    request = EngineCoreRequest("r", [1, 2], sampling, arrival_time=time.monotonic(), external_req_id="r")
    children = processor.add_request(request, "prompt", answer=reading)
    outputs: list[RequestOutput] = []
    ids = tokenizer.encode(text).ids
    for place, token_id in enumerate(ids):
        reason = finish if place == len(ids) - 1 else None
        step = [EngineCoreOutput(child.request_id, [token_id], finish_reason=reason) for child in children]
        outputs += processor.process_outputs(step).request_outputs
    return outputs


def parts(completion: CompletionOutput) -> tuple[str | None, str | None, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in completion.tool_calls]
    return completion.reasoning, completion.content, calls


WHOLE = ("hm, é", "I look.", [("now", '{"zone": "UTC"}')])


@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
def test_the_last_output_has_all_parts(byte_level: Tokenizer, kind: RequestOutputKind) -> None:
    # The last token of a request is one that is not shown.
    outputs = outputs_of(byte_level, TEXT + "<|end|>", READING, output_kind=kind)
    (completion,) = outputs[-1].outputs
    assert parts(completion) == WHOLE
    assert completion.text == TEXT
    assert len(completion.tool_calls[0].id) == len("call_") + 24
    assert len(outputs) == (1 if kind is FINAL_ONLY else len(byte_level.encode(TEXT).ids) + 1)


def test_parts_grow_and_nothing_is_taken_back(byte_level: Tokenizer) -> None:
    outputs = [output.outputs[0] for output in outputs_of(byte_level, TEXT + "<|end|>", READING)]
    for completion in outputs:
        reasoning, content, calls = parts(completion)
        assert WHOLE[0].startswith(reasoning or "")
        assert WHOLE[1].startswith(content or "")
        assert calls in ([], WHOLE[2])


def test_deltas_bring_what_is_new(byte_level: Tokenizer) -> None:
    deltas = [
        output.outputs[0] for output in outputs_of(byte_level, TEXT + "<|end|>", READING, output_kind=DELTA)
    ]
    assert "".join(delta.reasoning or "" for delta in deltas) == WHOLE[0]
    assert "".join(delta.content or "" for delta in deltas) == WHOLE[1]
    assert [parts(delta)[2] for delta in deltas if delta.tool_calls] == [WHOLE[2]]
    assert "".join(delta.text for delta in deltas) == TEXT


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_a_call_that_cannot_be_read_is_content_and_has_a_reason(
    byte_level: Tokenizer, kind: RequestOutputKind
) -> None:
    bad = '<tool_call>\n{"name": oops\n</tool_call>'
    outputs = outputs_of(byte_level, f"I look. {bad}<|end|>", READING, output_kind=kind)
    completions = [output.outputs[0] for output in outputs]
    seen = completions if kind is DELTA else completions[-1:]
    [unreadable] = [call for completion in seen for call in completion.unreadable_calls]
    assert (unreadable.text, unreadable.reason) == (bad, "the text ended within the call")
    assert "".join(completion.content or "" for completion in seen) == f"I look. {bad}"
    assert not any(completion.tool_calls for completion in seen)


def test_each_of_several_completions_is_divided(byte_level: Tokenizer) -> None:
    outputs = outputs_of(byte_level, TEXT + "<|end|>", READING, n=2, temperature=1.0)
    assert [parts(completion) for completion in outputs[-1].outputs] == [WHOLE, WHOLE]
    first, second = (completion.tool_calls[0].id for completion in outputs[-1].outputs)
    assert first != second


def test_an_answer_that_is_cut_off_keeps_its_text(byte_level: Tokenizer) -> None:
    cut = TEXT[: TEXT.index("UTC")]
    outputs = outputs_of(byte_level, cut, READING, FinishReason.LENGTH)
    reasoning, content, calls = parts(outputs[-1].outputs[0])
    assert (reasoning, calls) == ("hm, é", [])
    assert content == cut[cut.index("I look") :]


def test_without_a_format_there_are_no_parts(byte_level: Tokenizer) -> None:
    (completion,) = outputs_of(byte_level, TEXT + "<|end|>", None)[-1].outputs
    assert parts(completion) == (None, None, [])


def test_a_format_without_reasoning_has_content_alone(byte_level: Tokenizer) -> None:
    reading = AnswerReading(AnswerFormat(None, "hermes"))
    (completion,) = outputs_of(byte_level, "Yes<|end|>", reading)[-1].outputs
    assert parts(completion) == (None, "Yes", [])


@pytest.mark.parametrize("kept", [False, True])
def test_special_tokens_reach_the_parser_if_they_are_markers(byte_level: Tokenizer, kept: bool) -> None:
    reading = AnswerReading(
        AnswerFormat("qwen3", None, keeps_special_tokens=kept),
        special_tokens=frozenset({"<|end|>", "<|user|>", "<|assistant|>"}),
    )
    (completion,) = outputs_of(byte_level, "<think>a<|user|>b</think>c<|end|>", reading)[-1].outputs
    assert parts(completion) == ("ab", "c", [])
    assert ("<|user|>" in completion.text) is kept


class Chats(Prompting):
    """The part of a frontend that makes prompts, without an engine."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self.input_processor = self  # type: ignore[assignment]
        self.chat_encoder = QuotingEncoder(TextEncoder(tokenizer.backend_tokenizer))
        self.limit = PromptLimit(1000, "short")


@pytest.fixture
def chats(byte_level: Tokenizer) -> Chats:
    return Chats(PreTrainedTokenizerFast(tokenizer_object=byte_level, chat_template=TEMPLATE))


QUESTION = [{"role": "user", "content": "What time is it?"}]


def test_a_prompt_says_how_its_answer_is_to_be_read(chats: Chats) -> None:
    with_tools = answer_of(chats.render_chat(QUESTION, tools=[NOW]))
    assert with_tools is not None
    assert with_tools.format == AnswerFormat("qwen3", "hermes")
    assert json.dumps(with_tools.tools) == json.dumps([NOW])
    assert not with_tools.prompt_opens_reasoning
    without = answer_of(chats.render_chat(QUESTION, chat_template_kwargs={"enable_thinking": True}))
    assert without is not None
    assert without.format == AnswerFormat("qwen3", None)
    assert without.prompt_opens_reasoning


def test_a_plain_template_leaves_the_prompt_as_it_is(chats: Chats) -> None:
    prompt = chats.render_chat(QUESTION, chat_template="{{ messages[0].content }}", tools=[NOW])
    assert set(prompt) == {"prompt", "prompt_token_ids"}
    named = chats.render_chat(QUESTION, chat_template="{{ 'plain' }}", tools=[NOW], tool_parser="mistral")
    found = answer_of(named)
    assert found is not None
    assert found.format.tools == "mistral"
    off = chats.render_chat(QUESTION, tools=[NOW], tool_parser="none", reasoning_parser="none")
    assert answer_of(off) is None


def test_a_parser_that_does_not_exist_is_refused(chats: Chats) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tool_parser.*hermes"):
        chats.render_chat(QUESTION, tool_parser="zeus")


def test_a_prompt_with_another_kind_of_reading_is_refused() -> None:
    with pytest.raises(InvalidTypeError, match="answer"):
        answer_of({"prompt": "x", "answer": "json"})
    assert answer_of("text") is None
    assert answer_of([1, 2]) is None
