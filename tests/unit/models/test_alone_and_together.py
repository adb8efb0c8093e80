"""Answers have the same bits alone, together, from the prefix cache and in chunks of a few tokens, in the default dtype
and with rounded weights, for the families whose layers have kernels of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from random_models import random_tokens, save_tokenizer

from nbengine import LLM, SamplingParams
from tests.support.thorough import amount
from tests.unit.models.test_prepared_groups import MODELS

PROMPTS = [random_tokens(length) for length in (45, 20, 33, 6)]
CHUNK, NEW_TOKENS = 7, 12
NAMES = [
    *("deepseek 3 moe", "lfm2 moe", "glm4 moe"),
    *("ministral 3", "qwen3.5 moe", "gpt-oss", "gemma4 moe"),
]

Answer = tuple[list[int], list[float]]
"""Tokens, and their log-probabilities."""


def answers(llm: LLM, prompts: Sequence[list[int]], logprobs: int | None = 1) -> list[Answer]:
    """Ask for all prompts at once; without log-probabilities several steps may be computed at once."""
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=logprobs)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        tokens, stated = output.outputs[0].token_ids, output.outputs[0].logprobs or []
        numbers = [each[token].logprob for each, token in zip(stated, tokens, strict=bool(stated))]
        found.append((list(tokens), numbers))
    return found


@pytest.mark.parametrize("quantization", ["none", "int4"])
@pytest.mark.parametrize("name", amount(NAMES[:3], thorough=NAMES))
def test_answers_are_the_same_alone_together_cached_and_in_chunks(
    name: str, quantization: str, tmp_path: Path, random_model: Any
) -> None:
    kind, settings = MODELS[name]
    random_model(kind, **settings).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    options: dict[str, Any] = {
        "multiprocess": False,
        "dtype": "bfloat16",
        "max_model_len": 128,
        "block_size": 8,
    }
    options |= {"kv_cache_memory_bytes": 16 << 20}
    if quantization != "none":
        options["quantization"] = quantization
    with LLM(str(tmp_path), **options) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS]
        assert all(len(numbers) == NEW_TOKENS for _, numbers in alone)
        cached = answers(llm, PROMPTS)
        llm.reset_prefix_cache()
        assert answers(llm, PROMPTS) == alone
        assert [tokens for tokens, _ in answers(llm, PROMPTS, None)] == [tokens for tokens, _ in alone]
    assert cached == alone
    with LLM(str(tmp_path), max_num_batched_tokens=CHUNK, max_num_seqs=CHUNK, **options) as llm:
        assert answers(llm, PROMPTS) == alone
