"""Models on two nodes of a Ray cluster give the tokens that they give in one process."""

from __future__ import annotations

import pytest

from nbengine import LLM, SamplingParams
from tests.support.thorough import amount

PROMPTS = [{"prompt_token_ids": [3, 14, 15, 92, 65, 35]}, {"prompt_token_ids": list(range(2, 40))}]
OPTIONS = {"dtype": "float32", "num_gpu_blocks_override": 64, "max_model_len": 128}


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(PROMPTS * 2, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("model", "places"),
    [
        ("random-tiny", {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}),
        ("random-tiny-moe", {"data_parallel_size": 2, "data_parallel_backend": "ray"}),
        # What those that step together share, and nothing to exchange.
        *amount([], thorough=[("random-tiny", {"data_parallel_size": 2, "data_parallel_backend": "ray"})]),
    ],
)
def test_the_tokens_are_those_of_one_process(cluster, model: str, places: dict) -> None:
    alone = LLM(model, multiprocess=False, **OPTIONS)
    try:
        expected = tokens(alone)
    finally:
        alone.shutdown()
    with LLM(model, ray_address=cluster.address, **places, **OPTIONS) as divided:
        assert all(node.engine_processes() for node in cluster.nodes)
        assert tokens(divided) == expected
