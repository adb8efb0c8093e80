"""The mixture of experts `random-tiny-moe` through the whole engine in this process, against transformers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from process_support.tiny_models import check_greedy_output

from nbengine import LLM, SamplingParams
from nbengine.config import ModelConfig
from nbengine.models.checkpoints.files import resolve_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 64,
    "max_num_batched_tokens": 48,
    "multiprocess": False,
}
MODELS = {
    "as it is": ({}, 0),
    "weights as the router gives them": ({"norm_topk_prob": False}, 1),
    "three experts a token": ({"num_experts_per_tok": 3}, 2),
    "one expert a token": ({"num_experts_per_tok": 1}, 3),
}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, PreTrainedModel]]:
    from transformers import AutoModelForCausalLM

    overrides, seed = MODELS[request.param]
    directory = resolve_model(ModelConfig("random-tiny-moe", seed=seed)).directory
    oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **overrides).eval()
    with LLM("random-tiny-moe", seed=seed, hf_overrides=overrides, **OPTIONS) as engine:
        yield engine, oracle


def test_greedy_tokens_are_the_same_alone_together_in_chunks_and_from_the_prefix_cache(
    model: tuple[LLM, PreTrainedModel],
) -> None:
    llm, oracle = model
    chooser = random.Random(5)
    prompts = [
        {"prompt_token_ids": [chooser.randrange(256) for _ in range(length)]}
        for length in (1, 2, 17, 40, 90, 3, 64, 120)
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=6 + 3 * number, ignore_eos=True) for number in range(8)
    ]
    together = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts, params, use_tqdm=False)
    (alone,) = llm.generate(prompts[4], params[4], use_tqdm=False)
    assert any(output.num_cached_tokens > 0 for output in again)
    for output in (*together, *again, alone):
        check_greedy_output(oracle, output)
