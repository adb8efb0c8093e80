"""Models with latent attention in an engine: greedy tokens in float32 are those of transformers, no block is lost, and
a token takes one row of latents in each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import nbengine
from nbengine import LLM, SamplingParams
from nbengine.errors import EngineStartError, InvalidArgumentError
from tests.support.family_cases import CASES
from tests.support.random_models import assert_greedy, random_tokens, save_random
from tests.support.thorough import amount

NAMES = ["deepseek v2", "deepseek v3"]
WAYS = [(7, True, False), (64, False, True), (64, True, True)]
"""Tokens a step, the prefix cache, asynchronous steps."""
BLOCK_SIZE = 8
LONGEST = 250
NUM_NEW = amount(16, thorough=40)
LAYERS, WIDTH = 3, 24 + 8
"""Each of the layers keeps a latent of 24 numbers and a key of 8."""

Start = Callable[..., LLM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=NAMES)
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    case = CASES[request.param]
    return save_random(case.kind, case.settings, tmp_path)


@pytest.fixture
def start(oracle: Any, tmp_path: Path) -> Iterator[Start]:
    engines = []

    def start(**options: Any) -> LLM:
        settings = {"dtype": "float32", "max_model_len": LONGEST, "block_size": BLOCK_SIZE, "max_num_seqs": 8}
        engines.append(LLM(str(tmp_path), multiprocess=False, **{**settings, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


def run(llm: LLM, model: Any, prompts: list[list[int]], num_new: int) -> list[int]:
    """Check the tokens after all prompts; gives how many tokens of each were found in the cache."""
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    inputs: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == num_new
        assert_greedy(model, prompt, output.outputs[0].token_ids)
    (stats,) = llm.stats().engines
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    llm.llm_engine.engine_core.engine_core.scheduler.check_integrity()  # type: ignore[attr-defined]
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    ("oracle", "num_batched"),
    amount([("deepseek v2", 7), ("deepseek v3", 512)], thorough=[(n, b) for n in NAMES for b in (7, 512)]),
    indirect=["oracle"],
)
def test_prompts_cold_and_warm_alone_and_together(start: Start, oracle: Any, num_batched: int) -> None:
    llm = start(kv_cache_memory_bytes=4 << 20, max_num_batched_tokens=num_batched)
    prompts = [random_tokens(length) for length in (150, 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5, 97, 72)]
    assert run(llm, oracle, prompts, NUM_NEW) == [0] * len(prompts)
    assert run(llm, oracle, prompts, NUM_NEW) == [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in prompts]
    base = prompts[0]
    edited = [base[:length] + random_tokens(30, length) for length in (3, 16, 77, 150)]
    assert run(llm, oracle, edited, 5) == [0, 16, 72, 144]
    assert llm.reset_prefix_cache()
    assert run(llm, oracle, prompts[-1:], 5) == [0]


@pytest.mark.parametrize(
    ("oracle", "way"),
    amount(
        list(zip(["deepseek v3", "deepseek v2", "deepseek v3"], WAYS, strict=True)),
        thorough=[(name, way) for name in NAMES for way in WAYS],
    ),
    indirect=["oracle"],
)
def test_requests_that_are_preempted_give_the_same_tokens(
    start: Start, oracle: Any, way: tuple[int, bool, bool]
) -> None:
    num_batched, caching, is_async = way
    llm = start(
        num_gpu_blocks_override=32,
        max_num_batched_tokens=num_batched,
        enable_prefix_caching=caching,
        async_scheduling=is_async,
    )
    base = random_tokens(100)
    for seed in range(amount(1, thorough=2)):
        prompts = [random_tokens(3 + index, seed) for index in range(8)]
        prompts += [base[: 25 * index] + random_tokens(10, seed + index) for index in range(1, 5)]
        run(llm, oracle, prompts, amount(56, thorough=96))
    assert llm.stats().engines[0].num_preemptions > amount(2, thorough=5)


def test_a_block_takes_the_bytes_of_its_latents(start: Start) -> None:
    page = BLOCK_SIZE * LAYERS * WIDTH * 4
    llm = start(kv_cache_memory_bytes=100 * page + page - 1)
    assert llm.stats().engines[0].num_blocks == 100
    core: Any = llm.llm_engine.engine_core
    caches = core.engine_core.model_executor._worker.model_runner._kv_caches
    assert sum(cache.nbytes for cache in caches) == 100 * page
    assert {tuple(cache.shape) for cache in caches} == {(1, 100, 1, BLOCK_SIZE, WIDTH)}


def test_a_cache_that_is_too_small_is_refused_with_the_bytes_of_latents(start: Start) -> None:
    page = BLOCK_SIZE * LAYERS * WIDTH * 4
    with pytest.raises(EngineStartError, match=f"raise kv_cache_memory_bytes to at least {32 * page}"):
        start(kv_cache_memory_bytes=10 * page)


def test_latents_are_not_rounded_to_int8(start: Start) -> None:
    with pytest.raises(InvalidArgumentError, match="the model's layers keep latents"):
        start(kv_cache_dtype="int8", dtype="bfloat16", quantization="int8")


@pytest.mark.parametrize(
    ("oracle", "tp_size"),
    amount([("deepseek v3", 2)], thorough=[(n, t) for n in NAMES for t in (1, 2)]),
    indirect=["oracle"],
)
def test_fit_foretells_the_bytes_of_latents_which_every_rank_has(
    oracle: Any, tmp_path: Path, tp_size: int
) -> None:
    foretold = nbengine.fit(
        str(tmp_path), dtype="float32", block_size=BLOCK_SIZE, tensor_parallel_size=tp_size
    )
    assert foretold.page_bytes == tp_size * BLOCK_SIZE * LAYERS * WIDTH * 4
