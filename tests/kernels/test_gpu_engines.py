"""Engines on a real GPU, whose decode steps are recorded: greedy tokens in float32 are those of the CPU, which other tests
compare with transformers, while requests come and go, from the prefix cache, after preemption and after sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import recurrent_cases
import torch
from family_cases import CASES
from random_models import random_tokens, save_random

from nbengine import LLM, SamplingParams
from nbengine.worker.decode_graphs import CudaGraphs
from tests.support.thorough import combinations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NAMES = ["mistral window", "qwen3 window", "gemma2", "gpt-oss", "granite moe", "deepseek v2"]
RECURRENT = ["qwen3.5", "qwen3.5 moe", "granite 4 moe", "mamba-2", "nemotron-h", "lfm2"]
IN_16_BITS = [*NAMES, *(name for name in RECURRENT if not name.endswith("moe"))]
"""Of small random models with a state and experts, rounding chooses others too often."""
NOT_RECORDED = ("gpt-oss", *RECURRENT)
"""Its experts have biases, and are computed one after the other; the others have states."""
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 128,
    "block_size": 8,
    "device": "cuda",
    "multiprocess": False,
}
ROOMY = {"kv_cache_memory_bytes": 16 << 20}
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


def save(name: str, directory: Path) -> None:
    """Save a random model of one of the families."""
    own = recurrent_cases.CASES.get(name)
    save_random(*(own or (CASES[name].kind, CASES[name].settings)), directory)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """Return greedy answers of different lengths, so that batches shrink."""
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=12 + 4 * place, ignore_eos=True)
        for place in range(len(prompts))
    ]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def answers_of_the_cpu(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    with LLM(str(model), **ROOMY, **SETTINGS | {"device": "cpu"}) as llm:
        return answers(llm, prompts)


@pytest.mark.parametrize("name", [*NAMES, *RECURRENT])
def test_tokens_are_those_of_the_cpu(name: str, tmp_path: Path, recorded: list[object]) -> None:
    save(name, tmp_path)
    expected = answers_of_the_cpu(tmp_path, PROMPTS)
    with LLM(str(tmp_path), **ROOMY, **SETTINGS) as llm:
        assert answers(llm, PROMPTS) == expected
        before = len(recorded)
        assert bool(before) == (name not in NOT_RECORDED)
        assert answers(llm, PROMPTS) == expected
        # The second time the shapes are known.
        assert len(recorded) == before
        llm.sleep(level=1)
        llm.wake_up()
        assert answers(llm, PROMPTS) == expected
        assert (len(recorded) > before) == bool(before)


@pytest.mark.parametrize("name", ["qwen3 window", "lfm2"])
def test_preempted_requests_and_steps_that_are_not_recorded_give_the_same(
    name: str, tmp_path: Path, recorded: list[object]
) -> None:
    save(name, tmp_path)
    prompts = [random_tokens(length, 1) for length in (37, 34, 33, 39, 35, 38, 40, 36)]
    expected = answers_of_the_cpu(tmp_path, prompts)
    few = {"num_gpu_blocks_override": 30, "max_num_batched_tokens": 16, **SETTINGS, "max_model_len": 104}
    with LLM(str(tmp_path), **few) as llm:
        assert answers(llm, prompts) == expected
        (stats,) = llm.stats().engines
        assert stats.num_preemptions > 0
    assert bool(recorded) == (name not in NOT_RECORDED)
    recorded.clear()
    with LLM(str(tmp_path), enforce_eager=True, **ROOMY, **SETTINGS) as llm:
        assert answers(llm, prompts) == expected
    assert not recorded


def log_probabilities(outputs: Any, tokens: list[int]) -> torch.Tensor:
    """Return those of `tokens`, of each of which `outputs` has some candidates."""
    return torch.tensor([each[token].logprob for each, token in zip(outputs, tokens, strict=True)])


@pytest.mark.parametrize(
    ("name", "dtype", "eager"), combinations(IN_16_BITS, ["bfloat16", "float16"], [False, True])
)
def test_log_probabilities_in_16_bits_are_near_those_of_float32(
    name: str, dtype: str, eager: bool, tmp_path: Path
) -> None:
    save(name, tmp_path)
    prompt = PROMPTS[0]
    several = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    with LLM(str(tmp_path), enforce_eager=eager, **ROOMY, **SETTINGS | {"dtype": dtype}) as llm:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], several, use_tqdm=False)
    (answer,) = output.outputs
    tokens = [*prompt, *answer.token_ids]
    found = log_probabilities([*output.prompt_logprobs[1:], *answer.logprobs], tokens[1:])
    with LLM(str(tmp_path), **ROOMY, **SETTINGS) as llm:
        one = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([{"prompt_token_ids": tokens}], one, use_tqdm=False)
    expected = log_probabilities(output.prompt_logprobs[1:], tokens[1:])
    # Weights and all that goes from layer to layer have 8 or 11 bits.
    most = {"bfloat16": 0.3, "float16": 0.06}[dtype]
    for part in (slice(len(prompt) - 1), slice(len(prompt) - 1, None)):
        assert (found - expected)[part].abs().mean() < most
