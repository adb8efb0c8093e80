"""Hybrid models in an engine: greedy tokens in float32 are those of transformers, cold and from checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nbengine import LLM, SamplingParams
from tests.support.random_models import save_random
from tests.support.recurrent_cases import CASES
from tests.support.thorough import amount

NEW_TOKENS = 12
NAMES = [
    *("qwen3.5", "qwen3.5 moe", "qwen3-next", "granite 4 moe", "granite 4 without attention"),
    *("bamba", "mamba-2", "lfm2"),
]


TWO_WORKERS = amount(
    [("granite 4 of one group", "tensor_parallel_size"), ("mamba-2", "pipeline_parallel_size")],
    thorough=[
        (name, parallel)
        for name in ("qwen3.5", "granite 4 of one group", "mamba-2", "lfm2")
        for parallel in ("tensor_parallel_size", "pipeline_parallel_size")
    ],
)
"""Threads as ranks prove each family's division; processes that theirs is the same. `test_gguf_hybrids_equal_transformers.py`
has two other families."""


def likeliest(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The model's likeliest tokens after the prompt and each of `tokens` but the last; equal ones are greedy."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def check(name: str, directory: Path, *, multiprocess: bool, **options: Any) -> None:
    """Run prompts twice, of which the second time goes on from checkpoints, among them an edited one."""
    model, generator = save_random(*CASES[name], directory), torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in (70, 1, 33, 64, 5, 90)]
    prompts.append([*prompts[0][:48], 7, 8, 9, *prompts[0][51:]])
    settings = {
        "dtype": "float32",
        "max_model_len": 200,
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 4,
    }
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    with LLM(str(directory), multiprocess=multiprocess, **settings, **options) as llm:
        cached, told = [], []
        for _ in range(2):
            outputs = llm.generate(inputs, params, use_tqdm=False)
            told.append([list(output.outputs[0].token_ids) for output in outputs])
            cached.append([output.num_cached_tokens for output in outputs])
        assert told[0] == told[1]
        for prompt, tokens in zip(prompts, told[0], strict=True):
            assert len(tokens) == NEW_TOKENS
            assert tokens == likeliest(model, prompt, tokens)
        *cold, edited = cached[0]
        # Small states are kept at the end of every block, others where prompts have parted before.
        assert (cold, edited in (0, 48)) == ([0] * 6, True)
        assert cached[1] == [64, 0, 32, 48, 0, 80, 64]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_transformers_in_chunks_cold_and_from_checkpoints(
    name: str, tmp_path: Path
) -> None:
    check(name, tmp_path, multiprocess=False, max_num_batched_tokens=7)


@pytest.mark.parametrize(("name", "parallel"), TWO_WORKERS)
def test_two_workers_give_them_too(name: str, parallel: str, tmp_path: Path) -> None:
    check(name, tmp_path, multiprocess=True, max_num_batched_tokens=64, **{parallel: 2})
