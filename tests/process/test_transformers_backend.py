"""Models that have no family through whole engines, with the layers of transformers, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process_support.tiny_models import TinyModel, check_greedy_output

from nbengine import LLM, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 200, "max_num_batched_tokens": 48}
MODELS = {
    "StableLM": TinyModel("StableLm", 4, 2),
    "Starcoder2 with windows": TinyModel("Starcoder2", 4, 2, settings={"sliding_window": 21}),
}

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("model")
    return directory, MODELS[request.param].write(directory)


def prompts_of(*lengths: int) -> list[Any]:
    chooser = random.Random(5)
    begin = [chooser.randrange(250) for _ in range(40)]
    return [
        {"prompt_token_ids": (begin + [chooser.randrange(250) for _ in range(length)])[:length]}
        for length in lengths
    ]


def test_greedy_tokens_are_those_of_transformers_with_preemption_and_cached_prefixes(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    directory, oracle = saved
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = prompts_of(90, 17, 1, 40, 77, 64, 33, 100)
    # Behind a window of 21 tokens a request keeps two blocks, and those of a step.
    num_blocks = 26 if oracle.config.model_type == "stablelm" else 12
    few = {"num_gpu_blocks_override": num_blocks, "max_num_seqs": 8, "multiprocess": False}
    with LLM(str(directory), **few, **OPTIONS) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        again = [llm.generate(prompts[0], params, use_tqdm=False)[0] for _ in range(2)]
        stats = llm.stats().engines[0]
        (worker,) = llm.llm_engine.ready.workers
    for output in (*outputs, *again):
        check_greedy_output(oracle, output)
    assert stats.num_preemptions > 0
    assert again[1].num_cached_tokens >= 80
    assert stats.num_free_blocks == stats.num_blocks
    assert worker.implementation.startswith(f"{type(oracle).__name__} of transformers 5")


def test_an_engine_wakes_with_the_weights_of_its_files_and_their_tokens(
    saved: tuple[Path, PreTrainedModel],
) -> None:
    directory, oracle = saved
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(directory), num_gpu_blocks_override=64, multiprocess=False, **OPTIONS) as llm:
        for level in (1, 2):
            llm.sleep(level=level)
            llm.wake_up()
            for output in llm.generate(prompts_of(30, 5), params, use_tqdm=False):
                check_greedy_output(oracle, output)


def test_two_workers_give_the_tokens_of_transformers(tmp_path: Path) -> None:
    oracle = MODELS["Starcoder2 with windows"].write(tmp_path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path), num_gpu_blocks_override=64, tensor_parallel_size=2, **OPTIONS) as llm:
        outputs = llm.generate(prompts_of(60, 3, 31), params, use_tqdm=False)
    for output in outputs:
        check_greedy_output(oracle, output)
