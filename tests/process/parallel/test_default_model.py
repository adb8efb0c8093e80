"""The default model, 9 heads and 3 KV heads, over several workers: transformers' tokens, or one clear error."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from nbengine import LLM, AsyncLLM, RequestOutput, SamplingParams
from nbengine.errors import InvalidArgumentError
from tests.support.thorough import amount

CheckTokens = Callable[[list[int], list[int]], None]

TOPICS = ["the sea", "a clock", "bread", "the moon", "an old map"]
TOPICS = amount(TOPICS[:2], thorough=TOPICS)
RAW_PROMPTS = [f"Once upon a time there was a story about {topic}" for topic in TOPICS]
CHATS = [[{"role": "user", "content": f"Write two sentences about {topic}."}] for topic in TOPICS]
MAX_TOKENS = 20

pytestmark = pytest.mark.timeout(300)


def check_all(outputs: list[RequestOutput], check: CheckTokens) -> None:
    for output in outputs:
        assert output.finished
        assert output.prompt_token_ids is not None
        check(output.prompt_token_ids, output.outputs[0].token_ids)


@pytest.mark.parametrize(
    "sizes",
    amount(
        [{"tensor_parallel_size": 3}],
        thorough=[{"tensor_parallel_size": 3}, {"pipeline_parallel_size": 2}],
    ),
    ids=str,
)
def test_greedy_tokens_are_those_of_transformers(sizes: dict[str, Any], assert_greedy: CheckTokens) -> None:
    with LLM(
        "smollm2-135m",
        dtype="float32",
        max_model_len=amount(96, thorough=160),
        num_gpu_blocks_override=amount(6, thorough=14),
        max_num_seqs=16,
        max_num_batched_tokens=64,
        **sizes,
    ) as llm:
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        cold = llm.generate(RAW_PROMPTS, params, use_tqdm=False)
        chats = llm.chat(CHATS, params, use_tqdm=False)
        (warm,) = llm.generate(RAW_PROMPTS[-1:], params, use_tqdm=False)
        stats = llm.stats().engines[0]
    check_all([*cold, *chats], assert_greedy)
    assert warm.outputs[0].token_ids == cold[-1].outputs[0].token_ids
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("size", [2, 4, 9])
@pytest.mark.parametrize("frontend", [LLM, AsyncLLM])
def test_sizes_that_do_not_divide_its_heads_are_refused_before_anything_is_started(
    frontend: type[LLM | AsyncLLM], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(InvalidArgumentError) as caught:
        frontend("smollm2-135m", tensor_parallel_size=size)
    assert str(caught.value).startswith("tensor_parallel_size must be 1 or 3 ")
    assert str(caught.value).endswith(f"got {size}")
