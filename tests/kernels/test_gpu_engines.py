"""Engines on a real GPU, whose decode steps are recorded: greedy tokens in float32 are those of transformers on the CPU,
with requests that come and go, from the prefix cache, after preemption and after sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from family_cases import CASES
from random_models import assert_greedy, random_tokens, save_random

from nbengine import LLM, SamplingParams
from nbengine.worker.decode_graphs import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NAMES = ["mistral window", "qwen3 window", "gemma2", "gpt-oss", "granite moe", "deepseek v2"]
NOT_RECORDED = ("gpt-oss",)
"""Its experts have biases, and are computed one after the other."""
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 8,
    "device": "cuda",
    "multiprocess": False,
}
PROMPTS = [random_tokens(length) for length in (70, 34, 64, 33, 21)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that are recorded."""
    made: list[object] = []
    record = CudaGraphs.record

    def watched(recorder: CudaGraphs, step: Any) -> Any:
        made.append(record(recorder, step))
        return made[-1]

    monkeypatch.setattr(CudaGraphs, "record", watched)
    return made


def run(llm: LLM, oracle: Any, prompts: list[list[int]]) -> None:
    """Check answers of different lengths, so that batches shrink."""
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=12 + 4 * place, ignore_eos=True)
        for place in range(len(prompts))
    ]
    for prompt, output in zip(prompts, llm.generate(inputs, params, use_tqdm=False), strict=True):
        assert_greedy(oracle, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path, recorded: list[object]) -> None:
    oracle = save_random(CASES[name].kind, CASES[name].settings, tmp_path)
    with LLM(str(tmp_path), kv_cache_memory_bytes=16 << 20, **SETTINGS) as llm:
        run(llm, oracle, PROMPTS)
        before = len(recorded)
        assert bool(before) == (name not in NOT_RECORDED)
        run(llm, oracle, PROMPTS)
        # The second time the shapes are known.
        assert len(recorded) == before
        llm.sleep(level=1)
        llm.wake_up()
        run(llm, oracle, PROMPTS)
        assert (len(recorded) > before) == bool(before)


def test_preempted_requests_and_steps_that_are_not_recorded_give_the_same(
    tmp_path: Path, recorded: list[object]
) -> None:
    oracle = save_random(CASES["qwen3 window"].kind, CASES["qwen3 window"].settings, tmp_path)
    prompts = [random_tokens(length, 1) for length in (37, 34, 33, 39, 35, 38, 40, 36)]
    with LLM(str(tmp_path), num_gpu_blocks_override=30, max_num_batched_tokens=16, **SETTINGS) as llm:
        run(llm, oracle, prompts)
        (stats,) = llm.stats().engines
        assert stats.num_preemptions > 0
    assert recorded
    recorded.clear()
    with LLM(str(tmp_path), kv_cache_memory_bytes=16 << 20, enforce_eager=True, **SETTINGS) as llm:
        run(llm, oracle, prompts)
    assert not recorded
