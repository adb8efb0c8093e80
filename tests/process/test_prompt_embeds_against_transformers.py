"""Prompts given as embeddings, float32: transformers' greedy tokens, whatever the circumstances."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from process_support.tiny_models import TinyModel, check_greedy

from nbengine import LLM, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXTS = [
    "Once upon a time, long ago, there was a story about the sea, and about the ships that crossed it in winter",
    "def main():\n    # a function that prints the first ten prime numbers, each on a line of its own\n",
    "Once upon a time, long ago, there was a story about the sea, and about the fish that lived below",
    "The moon",
]
COMMON = 64
"""Tokens in whole blocks with which the first and the third begin: each byte is one."""
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def oracle(directory: Path) -> PreTrainedModel:
    return TinyModel("Llama", 4, 2).write(directory)


@pytest.fixture(params=["chunks of 16, preempted", "whole prompts"])
def llm(request: pytest.FixtureRequest, oracle: PreTrainedModel, directory: Path) -> Iterator[LLM]:
    tight = request.param != "whole prompts"
    with LLM(
        str(directory),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        num_gpu_blocks_override=14 if tight else 200,
        max_num_batched_tokens=16 if tight else 2048,
        multiprocess=False,
    ) as engine:
        yield engine


def test_embeddings_beside_tokens_are_continued_as_by_transformers(llm: LLM, oracle: PreTrainedModel) -> None:
    table = oracle.get_input_embeddings().weight.detach()
    tokenizer = llm.get_tokenizer()
    tokens = [tokenizer.encode(text) for text in TEXTS]
    plain = [table[ids] for ids in tokens]
    # Embeddings of no token: soft prompts.
    generator = torch.Generator().manual_seed(3)
    soft = [
        rows + 0.02 * torch.randn(rows.shape, generator=generator).mul(rows.abs().mean()) for rows in plain
    ]
    soft.append(torch.stack([rows[:4].mean(0) for rows in plain]))
    prompts = [{"prompt_embeds": rows} for rows in (*plain, *soft)]
    outputs = llm.generate([*prompts, *TEXTS], GREEDY, use_tqdm=False)
    for rows, output in zip((*plain, *soft), outputs, strict=False):
        check_greedy(oracle, rows, output.outputs[0].token_ids)
    for ids, embedded, output in zip(tokens, outputs, outputs[-len(TEXTS) :], strict=False):
        check_greedy(oracle, ids, output.outputs[0].token_ids)
        assert embedded.outputs[0].token_ids == output.outputs[0].token_ids
    stats = llm.stats().engines[0]
    assert bool(stats.num_preemptions) == (stats.num_blocks == 14)
    for index in (0, 2):
        (warm,) = llm.generate(prompts[index], GREEDY, use_tqdm=False)
        assert warm.outputs[0].token_ids == outputs[index].outputs[0].token_ids
    assert warm.num_cached_tokens >= COMMON
    assert llm.stats().engines[0].num_free_blocks == stats.num_blocks
