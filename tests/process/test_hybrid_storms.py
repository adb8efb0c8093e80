"""Hybrid models when blocks and slots are few: greedy tokens are those of transformers, and nothing is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nbengine import LLM, RequestOutput, SamplingParams
from tests.support.random_models import assert_greedy, random_tokens, save_random
from tests.support.recurrent_cases import CASES
from tests.support.thorough import amount

NAMES = ["qwen3.5", "qwen3-next", "granite 4 moe", "granite 4 without attention", "mamba-2", "lfm2"]
WAYS = {
    "small steps": {"num_batched": 7, "max_num_seqs": 4, "caching": True, "is_async": False},
    "asynchronous": {"num_batched": 64, "max_num_seqs": 4, "caching": True, "is_async": True},
    "more requests than slots": {"num_batched": 64, "max_num_seqs": 12, "caching": False, "is_async": True},
}
PAIRS = amount(
    [
        ("qwen3.5", "small steps"),
        ("mamba-2", "asynchronous"),
        ("granite 4 moe", "more requests than slots"),
        ("lfm2", "more requests than slots"),
    ],
    thorough=[(name, way) for name in NAMES for way in WAYS],
)
"""Each kind of state and each way once. `test_hybrids_equal_transformers.py` has each family."""
ROUNDS = amount(1, thorough=4)

Start = Callable[..., LLM]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def oracle(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    kind, settings = CASES[request.param]
    # So that blocks are not small beside slots, whose number goes by their bytes.
    more = {
        "num_key_value_heads": 4,
        **{name: 8 for name in ("mamba_d_state", "state_size") if name in settings},
    }
    return save_random(kind, {**settings, **more}, tmp_path)


@pytest.fixture
def start(oracle: Any, tmp_path: Path) -> Iterator[Start]:
    engines = []

    def start(**options: Any) -> LLM:
        settings = {"dtype": "float32", "max_model_len": 200, "multiprocess": False}
        engines.append(LLM(str(tmp_path), **{**settings, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


def check_idle(llm: LLM) -> None:
    (stats,) = llm.stats().engines
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_state_slots == stats.num_state_slots > 0
    llm.llm_engine.engine_core.engine_core.scheduler.check_integrity()  # type: ignore[attr-defined]


def storm(seed: int) -> list[list[int]]:
    """Prompts that come in together and do not fit together later, some with a beginning in common."""
    base = random_tokens(120, 7)
    prompts = [random_tokens(2 + index, seed) for index in range(8)]
    prompts += [random_tokens(40 + 15 * index, seed) for index in range(4)]
    prompts += [base[: 23 * index] + random_tokens(9, seed + index) for index in range(1, 6)]
    return prompts


def run(llm: LLM, model: Any, prompts: list[list[int]], chooser: random.Random, aborts: int = 0) -> int:
    """Check the tokens after all prompts but those of requests that are aborted on their way; gives how many
    tokens the checked ones have found in the cache."""
    engine = llm.llm_engine
    ids = {}
    for prompt in prompts:
        params = SamplingParams(temperature=0, max_tokens=chooser.randrange(30, 70), ignore_eos=True)
        ids[engine.add_request("storm", {"prompt_token_ids": prompt}, params)] = prompt, params
    names = list(ids)
    chooser.shuffle(names)
    leaving, step, found = names[:aborts], 0, 0
    finished: list[RequestOutput] = []
    abort_at = sorted(chooser.sample(range(2, 60), aborts))
    while engine.has_unfinished_requests():
        finished += [o for o in engine.step() if isinstance(o, RequestOutput) and o.finished]
        step += 1
        while abort_at and step >= abort_at[0]:
            abort_at.pop(0)
            engine.abort_request(leaving.pop())
    wanted = sorted((prompt, params.max_tokens) for name, (prompt, params) in ids.items())
    got = sorted((o.prompt_token_ids, len(o.outputs[0].token_ids)) for o in finished)
    if not aborts:
        assert got == wanted
    assert len(finished) >= len(prompts) - aborts
    for output in finished:
        assert output.prompt_token_ids is not None
        assert_greedy(model, output.prompt_token_ids, output.outputs[0].token_ids)
        found += output.num_cached_tokens or 0
    check_idle(llm)
    return found


def few(model: Any) -> dict[str, Any]:
    """Return the arguments for an engine with blocks for little more than one of the longest requests, and
    slots for four or a few more."""
    if "full_attention" in model.config.layer_types:
        return {"num_gpu_blocks_override": 20}
    return {"kv_cache_memory_bytes": 150_000}


@pytest.mark.parametrize(("oracle", "way"), PAIRS, indirect=["oracle"])
def test_preemptions_and_aborts_change_no_token_and_lose_nothing(start: Start, oracle: Any, way: str) -> None:
    num_batched, caching = WAYS[way]["num_batched"], bool(WAYS[way]["caching"])
    llm = start(
        **few(oracle),
        max_num_batched_tokens=num_batched,
        max_num_seqs=WAYS[way]["max_num_seqs"],
        enable_prefix_caching=caching,
        async_scheduling=WAYS[way]["is_async"],
    )
    chooser, found = random.Random(num_batched), 0
    for seed in range(ROUNDS):
        found += run(llm, oracle, storm(seed), chooser)
        found += run(llm, oracle, storm(seed), chooser, aborts=6)
    (stats,) = llm.stats().engines
    # A model without blocks has nothing that a request could run out of.
    assert (stats.num_preemptions > 2 * ROUNDS) is (stats.num_blocks > 0)
    assert (stats.num_checkpoints > 0) is caching
    assert (found > 0) is caching
    assert llm.reset_prefix_cache()
    assert llm.stats().engines[0].num_checkpoints == 0
    check_idle(llm)


@pytest.mark.parametrize("oracle", amount(["qwen3.5"], thorough=NAMES), indirect=True)
def test_a_sleep_takes_states_and_checkpoints_and_changes_no_token(start: Start, oracle: Any) -> None:
    llm = start(**few(oracle), max_num_batched_tokens=64, max_num_seqs=4)
    prompts, chooser = [random_tokens(length, 3) for length in (70, 33, 64)], random.Random(1)
    for level in (1, 2):
        assert run(llm, oracle, prompts, chooser) == 0
        assert run(llm, oracle, prompts[:1], chooser) > 0
        llm.sleep(level=level)
        assert llm.stats().engines[0].num_checkpoints == 0
        llm.wake_up()
