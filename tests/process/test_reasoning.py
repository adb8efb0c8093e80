"""Reasoning end to end: a model of noise thinks, is cut short, and answers in a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nbengine import LLM, InvalidArgumentError, SamplingParams, StructuredOutputsParams
from tests.support.thorough import amount

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"type": "integer", "maximum": 999}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking is not defined %}<think>\n"
    "{% elif not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HELLO = [{"role": "user", "content": "Where?"}]
BUDGET = 12
SEEDS = amount(12, thorough=24)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["one step at a time", "steps in flight", "few blocks"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options: dict[str, Any] = {"async_scheduling": request.param != "one step at a time"}
    if request.param == "few blocks":
        options["num_gpu_blocks_override"] = 40
    with LLM(
        "random-tiny", multiprocess=False, chat_template=TEMPLATE, max_model_len=512, block_size=16, **options
    ) as engine:
        engine.generate(
            "x",
            SamplingParams(max_tokens=2, structured_outputs=StructuredOutputsParams(regex="a")),
            use_tqdm=False,
        )
        yield engine


def asked(seed: int = 0, **params: Any) -> SamplingParams:
    outputs = StructuredOutputsParams(json=SCHEMA)
    return SamplingParams(
        **{"temperature": 1.0, "seed": seed, "max_tokens": 300, "structured_outputs": outputs} | params
    )


def test_a_form_begins_behind_thoughts_that_a_template_opens_and_never_closes(llm: LLM) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: <think>\n"
    params = [asked(seed, thinking_budget=BUDGET) for seed in range(4)]
    for output in llm.chat([HELLO] * 4, params, use_tqdm=False, chat_template=template):
        (completion,) = output.outputs
        reasoning, _, answer = completion.text.rpartition("</think>")
        check(answer)
        assert json.loads(completion.content or "") == json.loads(answer)
        assert (completion.reasoning or "") == reasoning.strip()


def chat(llm: LLM, params: list[SamplingParams], **variables: Any) -> list[tuple[str, str]]:
    """Return each answer's reasoning, which the prompt has begun, and what follows it."""
    kwargs = {"chat_template_kwargs": variables} if variables else {}
    outputs = llm.chat([HELLO] * len(params), params, use_tqdm=False, **kwargs)
    answers = []
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "stop", completion.text
            reasoning, _, answer = completion.text.rpartition("</think>")
            assert completion.content is not None
            assert json.loads(completion.content) == json.loads(answer)
            assert (completion.reasoning or "") == reasoning.strip().removeprefix("<think>").strip()
            answers.append((reasoning, answer))
    return answers


def check(answer: str) -> None:
    assert set(json.loads(answer)) == {"city", "size"}


def test_json_follows_thoughts_that_are_cut_short(llm: LLM) -> None:
    preempted = llm.stats().engines[0].num_preemptions
    answers = chat(llm, [asked(seed, thinking_budget=BUDGET) for seed in range(SEEDS)])
    assert len({reasoning for reasoning, _ in answers}) > SEEDS // 2
    for reasoning, answer in answers:
        check(answer)
        assert reasoning.endswith("\n")
    if llm.config.cache.num_gpu_blocks_override is not None:
        assert llm.stats().engines[0].num_preemptions > preempted


def test_several_answers_to_one_prompt_think_each_for_itself(llm: LLM) -> None:
    answers = chat(llm, [asked(n=5, thinking_budget=BUDGET)])
    assert len({reasoning for reasoning, _ in answers}) > 1
    for _, answer in answers:
        check(answer)


def test_a_model_that_is_told_not_to_think_answers_at_once(llm: LLM) -> None:
    for reasoning, answer in chat(llm, [asked(seed) for seed in range(4)], enable_thinking=False):
        assert reasoning == ""
        check(answer)


def test_one_that_may_think_does_or_answers_at_once(llm: LLM) -> None:
    answers = chat(llm, [asked(seed, thinking_budget=BUDGET) for seed in range(SEEDS)], enable_thinking=True)
    for reasoning, answer in answers:
        check(answer)
        assert not reasoning or re.match(r"\n?<think>", reasoning)
    assert {bool(reasoning) for reasoning, _ in answers} == {True, False}


def test_a_budget_without_a_grammar_leaves_the_answer_free(llm: LLM) -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=60,
        thinking_budget=BUDGET,
        ignore_eos=True,
        skip_special_tokens=False,
    )
    (output,) = llm.chat(HELLO, params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    closing = llm.get_tokenizer().encode("\n</think>\n\n", add_special_tokens=False)
    assert len(tokens) == 60
    assert tokens[BUDGET : BUDGET + len(closing)] == closing
    longer = SamplingParams(
        temperature=1.0, seed=4, max_tokens=60, ignore_eos=True, skip_special_tokens=False
    )
    (free,) = llm.chat(HELLO, longer, use_tqdm=False)
    assert free.outputs[0].token_ids[:BUDGET] == tokens[:BUDGET]


def test_a_budget_of_nothing_closes_the_thought_at_once(llm: LLM) -> None:
    ((reasoning, answer),) = chat(llm, [asked(thinking_budget=0)])
    assert reasoning == "\n"
    check(answer)


def test_a_prompt_without_marks_has_no_budget_and_the_others_go_on(llm: LLM) -> None:
    with pytest.raises(InvalidArgumentError, match=r"thinking_budget must be None.*got 3"):
        llm.generate("x", SamplingParams(thinking_budget=3), use_tqdm=False)
    check(chat(llm, [asked(thinking_budget=1)])[0][1])


def test_engine_cores_of_their_own_are_told_where_reasoning_is() -> None:
    # All of them read the same file.
    size = amount(1, thorough=2)
    with LLM("random-tiny", chat_template=TEMPLATE, max_model_len=512, data_parallel_size=size) as engine:
        answers = chat(engine, [asked(seed, thinking_budget=BUDGET) for seed in range(8)])
        for reasoning, answer in answers:
            assert reasoning
            check(answer)
