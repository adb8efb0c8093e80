"""Calls of tools end to end: a model of noise calls what it has to, in every family's way, and callers get calls."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from nbengine import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from nbengine.frontend.parsing.formats import TOOL_PARSERS, AnswerFormat
from nbengine.frontend.parsing.reading import added_token_ids_of, answer_of
from nbengine.frontend.parsing.tool_grammar import tool_grammar
from nbengine.frontend.text.tools import tool_schemas

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:{% if tools %}"
    "{# <tool_call> #}{% endif %}{# <think></think> #}"
)
QUESTION = [{"role": "user", "content": "What is the weather like?"}]

pytestmark = pytest.mark.timeout(300)


def weather(place: Literal["Rome", "Paris"], days: Literal[1, 2, 3], fine: bool = True) -> str:
    """Say what the weather is like.

    Args:
        place: The town.
        days: The number of days.
        fine: Only fine days.
    """
    return f"{place} {days} {fine}"


def params(tools: str, tokenizer: Any, **options: Any) -> SamplingParams:
    grammar = tool_grammar(
        AnswerFormat(None, tools),
        tool_schemas([weather]),
        "required",
        parallel=False,
        strict=True,
        added_token_ids=added_token_ids_of(tokenizer),
    )
    return SamplingParams(max_tokens=400, structured_outputs=grammar, **options)


def test_required_calls_arrive_as_calls() -> None:
    options = {"dtype": "float32", "chat_template": TEMPLATE, "num_gpu_blocks_override": 512}
    with LLM("random-tiny", multiprocess=False, **options) as llm:
        for tools in TOOL_PARSERS:
            if tools != "gpt_oss":  # which thinks in front of its calls, here without an end
                check_calls(llm, tools)
        check_the_template(llm)


def check_calls(llm: LLM, tools: str) -> None:
    own = params(tools, llm.get_tokenizer(), n=4, temperature=1.0, seed=3)
    (output,) = llm.chat(QUESTION, own, tools=[weather], tool_parser=tools, use_tqdm=False)
    for completion in output.outputs:
        assert completion.finish_reason == "stop", completion.text
        (call,) = completion.tool_calls
        assert call.name == "weather"
        assert weather(**json.loads(call.arguments))
        assert (completion.content, completion.reasoning) == ("", "")
    assert len({completion.tool_calls[0].id for completion in output.outputs}) == 4


def check_the_template(llm: LLM) -> None:
    """Check that the template alone tells how an answer is read, and that calls are found only with tools."""
    own = params("hermes", llm.get_tokenizer(), temperature=0.0)
    (called,) = llm.chat(QUESTION, own, tools=[weather], use_tqdm=False)[0].outputs
    assert [call.name for call in called.tool_calls] == ["weather"]
    assert "<tool_call>" in called.text
    (plain,) = llm.chat(QUESTION, own, use_tqdm=False)[0].outputs
    assert (plain.tool_calls, plain.content) == ([], plain.text)


async def test_a_stream_brings_the_call_once() -> None:
    async with AsyncLLM(
        "random-tiny", dtype="float32", chat_template=TEMPLATE, num_gpu_blocks_override=512
    ) as llm:
        prompt = llm.render_chat(QUESTION, tools=[weather])
        assert answer_of(prompt) is not None
        own = params("hermes", llm.get_tokenizer(), temperature=0.0, output_kind=RequestOutputKind.DELTA)
        calls = [call async for output in llm.generate(prompt, own) for call in output.outputs[0].tool_calls]
        assert [call.name for call in calls] == ["weather"]
        whole = params("hermes", llm.get_tokenizer(), temperature=0.0)
        outputs = [output async for output in llm.generate(prompt, whole)]
        assert [call.arguments for call in outputs[-1].outputs[0].tool_calls] == [calls[0].arguments]
