"""Models with windows in an engine: greedy tokens in float32 are those of transformers, and no block is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbengine import LLM, SamplingParams
from tests.support.family_cases import CASES
from tests.support.random_models import assert_greedy, random_tokens, save_random
from tests.support.thorough import amount

NAMES = ["gemma3", "gpt-oss", "mistral window"]
WAYS = [(7, True, False), (64, False, True), (64, True, True)]
"""Tokens a step, the prefix cache, asynchronous steps."""
WINDOW, BLOCK_SIZE = 24, 8
"""A window of three blocks."""
LONGEST = 250
NUM_NEW = amount(2 * WINDOW + 1, thorough=4 * WINDOW)

Start = Callable[..., LLM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    case = CASES[request.param]
    return save_random(case.kind, {**case.settings, "sliding_window": WINDOW}, tmp_path)


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
    check_idle(llm)
    return [output.num_cached_tokens for output in outputs]


def check_idle(llm: LLM) -> None:
    (stats,) = llm.stats().engines
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    llm.llm_engine.engine_core.engine_core.scheduler.check_integrity()  # type: ignore[attr-defined]


def each_with(quick: list[Any], options: list[Any]) -> list[Any]:
    """Pairs of models and options: each model and each option once, or in `make thorough` all pairs."""
    return amount(
        list(zip(NAMES, quick, strict=True)),
        thorough=[(name, option) for name in NAMES for option in options],
    )


@pytest.mark.parametrize(
    ("oracle", "num_batched"), each_with([7, 512, 64], [7, 64, 512]), indirect=["oracle"]
)
def test_prompts_and_answers_of_several_windows_cold_and_warm(
    start: Start, oracle: Any, num_batched: int
) -> None:
    llm = start(kv_cache_memory_bytes=16 << 20, max_num_batched_tokens=num_batched)
    prompts = [random_tokens(length) for length in (150, 1, WINDOW - 1, WINDOW, WINDOW + 1, 5, 97, 72)]
    assert run(llm, oracle, prompts, NUM_NEW) == [0] * len(prompts)
    assert run(llm, oracle, prompts, NUM_NEW) == [(len(p) - 1) // BLOCK_SIZE * BLOCK_SIZE for p in prompts]
    assert llm.reset_prefix_cache()
    assert run(llm, oracle, prompts[-1:], 5) == [0]


@pytest.mark.parametrize(("oracle", "num_batched"), each_with([64, 7, 7], [7, 64]), indirect=["oracle"])
def test_requests_that_share_a_prefix_inside_across_and_beyond_a_window(
    start: Start, oracle: Any, num_batched: int
) -> None:
    """One that runs already, one that has ended, and several at once."""
    llm = start(kv_cache_memory_bytes=16 << 20, max_num_batched_tokens=num_batched)
    base = random_tokens(160)
    run(llm, oracle, [base], 3)
    shared = [WINDOW // 3, WINDOW - 1, WINDOW, WINDOW + BLOCK_SIZE + 1, 3 * WINDOW + 4, 150, 160]
    prompts = [base[:length] + random_tokens(30, length) for length in shared]
    found = run(llm, oracle, prompts, WINDOW + 5)
    assert found == [length // BLOCK_SIZE * BLOCK_SIZE for length in shared]
    # At once: what one of them computes another may find in the next step.
    fresh = random_tokens(130, 5)
    run(llm, oracle, [fresh[:length] + random_tokens(9, length) for length in (20, 64, 64, 111, 130)], 40)


@pytest.mark.parametrize(("oracle", "way"), each_with(WAYS, WAYS), indirect=["oracle"])
def test_requests_that_are_preempted_give_the_same_tokens(
    start: Start, oracle: Any, way: tuple[int, bool, bool]
) -> None:
    num_batched, caching, is_async = way
    # Just enough for one of the longest: one group with a window, or two and one without.
    num_blocks = 13 if oracle.config.model_type == "mistral" else 32 + 2 * 12
    llm = start(
        num_gpu_blocks_override=num_blocks,
        max_num_batched_tokens=num_batched,
        enable_prefix_caching=caching,
        async_scheduling=is_async,
    )
    base = random_tokens(100)
    for seed in range(amount(1, thorough=2)):
        # Short ones come in together, and do not fit together when they are long.
        prompts = [random_tokens(3 + index, seed) for index in range(8)]
        prompts += [base[: 25 * index] + random_tokens(10, seed + index) for index in range(1, 5)]
        run(llm, oracle, prompts, NUM_NEW)
    assert llm.stats().engines[0].num_preemptions > amount(2, thorough=5)
