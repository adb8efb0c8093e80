"""Workers in processes of their own under an engine core in this process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_support.tiny_models import QUANTISED

from nbengine import LLM, SamplingParams
from nbengine.errors import EngineDeadError

pytestmark = pytest.mark.fresh_processes

OPTIONS: dict[str, Any] = {
    "model": "random-tiny",
    "dtype": "float32",
    "multiprocess": False,
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
}
PROMPTS = [f"prompt {number} " * (number + 1) for number in range(8)]
PARAMS = [
    SamplingParams(temperature=0.9 if number % 2 else 0, seed=number, max_tokens=12) for number in range(8)
]

NEAR = 0.05
"""Log probabilities of the same token that are this close may be in another order with several workers."""


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_its_workers_say_what_one_process_says_and_end_with_it() -> None:
    with LLM(**OPTIONS) as alone:
        expected = tokens(alone)
    with LLM(**OPTIONS, tensor_parallel_size=2) as llm:
        assert len(psutil.Process().children()) == 2
        assert tokens(llm) == expected
        assert tokens(llm) == expected
        assert [worker.rank for worker in llm.stats().engines[0].workers] == [0, 1]
        victim = psutil.Process().children()[1]
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker \d \(TP\d\).*SIGKILL"):
            tokens(llm)
    assert psutil.Process().children() == []


def test_workers_with_an_int8_kv_cache_say_what_one_process_says() -> None:
    with LLM(**OPTIONS, kv_cache_dtype="int8") as alone:
        expected = tokens(alone)
    with LLM(**OPTIONS, kv_cache_dtype="int8", tensor_parallel_size=2) as llm:
        assert tokens(llm) == expected


def test_workers_with_prepared_steps_say_what_one_process_says(model_of_blocks: Path) -> None:
    """As far as logits that are sums in another order can: their rounded activations differ in places."""
    options = {**OPTIONS, "model": str(model_of_blocks), "dtype": "bfloat16", "quantization": QUANTISED}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(**options, tensor_parallel_size=2) as llm:
        asked = llm.generate(PROMPTS, greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)] == [
            output.outputs[0].token_ids for output in asked
        ]
        assert [
            llm.generate(prompt, greedy, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS
        ] == [output.outputs[0].token_ids for output in asked]
    with LLM(**options) as alone:
        equal = 0
        for output in asked:
            assert output.prompt_token_ids is not None
            prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
            (own,) = alone.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False)
            equal += own.outputs[0].token_ids == tokens
            scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
            (whole,) = alone.generate({"prompt_token_ids": [*prompt, *tokens]}, scored, use_tqdm=False)
            assert whole.prompt_logprobs is not None
            for token, row in zip(tokens, whole.prompt_logprobs[len(prompt) :], strict=True):
                assert row is not None
                assert row[token].logprob > max(entry.logprob for entry in row.values()) - NEAR
        assert equal > len(asked) // 2
