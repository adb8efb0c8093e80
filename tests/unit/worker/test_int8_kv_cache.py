"""An engine whose KV cache is int8: its tokens, its memory, and where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from nbengine import LLM, SamplingParams
from nbengine.config import CacheConfig, EngineArgs, EngineConfig
from nbengine.engine.fit_probe import answer, answers
from nbengine.errors import InvalidArgumentError
from nbengine.frontend import fit as fit_module
from nbengine.ipc.fit import FitQuestion, FitQuestions
from nbengine.kernels import dispatch
from nbengine.kernels.kv_cache import cache_shape
from nbengine.models import loading
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.configs.hf_config import load_hf_config
from nbengine.models.loading import resolve_precision
from nbengine.worker import worker as worker_module
from nbengine.worker.memory.kv_pages import KVPages
from nbengine.worker.worker import Worker
from tests.support.thorough import some

INT8, CPU = torch.int8, torch.device("cpu")
GREEDY = SamplingParams(temperature=0)


def prompts(count: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(256) for _ in range(random.randint(1, 40))] for _ in range(count)]


@pytest.fixture
def int8_config(tiny_config: EngineConfig) -> EngineConfig:
    return replace(tiny_config, cache=replace(tiny_config.cache, kv_cache_dtype="int8"))


@pytest.mark.parametrize("seed", some(range(4), ordinary=2))
def test_chunks_preemptions_and_batches_do_not_change_greedy_tokens(
    driver: Callable[..., Any], new_runner: Callable[..., Any], seed: int
) -> None:
    given = {f"r{i}": prompt for i, prompt in enumerate(prompts(12, seed))}
    alone = {}
    runner = new_runner(kv_dtype=INT8)
    for req_id, prompt in given.items():
        one = driver(runner=runner)
        one.add(req_id, prompt, GREEDY)
        alone |= one.run()
        # The next driver may use the same blocks: the runner forgets the request with an empty step.
        one.step()
    run = driver(seed, chaos=1.0, runner=new_runner(kv_dtype=INT8))
    for req_id, prompt in given.items():
        run.add(req_id, prompt, GREEDY)
    assert run.run() == alone
    assert run.num_preemptions > 3
    assert run.max_batch > 3


def test_its_logits_are_near_those_of_a_float32_cache_but_not_the_same(
    driver: Callable[..., Any], new_runner: Callable[..., Any]
) -> None:
    params = SamplingParams(temperature=0, logprobs=5)
    found = []
    for kv_dtype in (torch.float32, INT8):
        run = driver(runner=new_runner(kv_dtype=kv_dtype))
        run.add("r", prompts(1, 3)[0] + list(range(50)), params, max_tokens=1)
        run.run()
        found.append(torch.tensor(run.logprobs["r"][0].logprobs)[0])
    distance = (found[0] - found[1]).abs().max()
    assert 0 < distance < 0.02


def engine(**options: Any) -> LLM:
    settings = {"multiprocess": False, "max_model_len": 200, "kv_cache_dtype": "int8", "dtype": "float32"}
    return LLM("random-tiny", **{**settings, **options})


def tokens(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    return [
        output.outputs[0].token_ids
        for output in llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    ]


def test_prefix_hits_and_a_crowded_pool_do_not_change_greedy_tokens() -> None:
    common = prompts(1, 9)[0] * 3
    given = [common[:60] + prompt for prompt in prompts(6, 2)]
    with engine(num_gpu_blocks_override=400, enable_prefix_caching=False) as llm:
        expected = [tokens(llm, [ids])[0] for ids in given]
    with engine(num_gpu_blocks_override=400, max_num_batched_tokens=32) as llm:
        assert tokens(llm, given) == expected
        assert tokens(llm, given[::-1]) == expected[::-1]
        stats = llm.stats().engines[0]
        assert stats.prefix_cache_hits > 0
    with engine(num_gpu_blocks_override=20, max_num_batched_tokens=48) as llm:
        assert tokens(llm, given) == expected
        assert llm.stats().engines[0].num_preemptions > 0


def test_the_bytes_that_are_counted_are_those_that_the_cache_takes(int8_config: EngineConfig) -> None:
    worker = Worker(int8_config)
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(24)
    caches = worker.model_runner._kv_caches
    model = worker.model.config
    assert {cache.dtype for cache in caches} == {INT8}
    assert {tuple(cache.shape) for cache in caches} == {
        cache_shape(INT8, 24, model.num_kv_heads, 4, model.head_dim)
    }
    taken = sum(cache.nbytes for cache in caches)
    assert worker.worker_info().kv_cache_bytes == taken
    heads = 2 * 24 * 4 * model.num_layers * model.num_kv_heads
    assert taken == heads * (model.head_dim + 4)
    pages = KVPages(caches)
    pages.join()
    assert sum(num_bytes for pieces in pages._rounds() for _, num_bytes in pieces) == taken
    worker.sleep(1)
    worker.wake_up("weights")
    worker.wake_up("kv_cache")
    assert [cache.dtype for cache in worker.model_runner._kv_caches] == [INT8] * model.num_layers
    assert not any(cache.any() for cache in worker.model_runner._kv_caches)


def resolved(**arguments: Any) -> EngineConfig:
    config = EngineArgs(model="random-tiny", **arguments).create_engine_config(bound=True)
    return replace(config, model=resolve_model(config.model))


def test_fit_counts_it_and_has_more_blocks_in_the_same_memory() -> None:
    given = {"dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "max_model_len": 128}
    wide, narrow = answer(FitQuestion([resolved(**given), resolved(**given, kv_cache_dtype="int8")])).plans
    head_dim = load_hf_config(resolved().model)["head_dim"]
    assert wide.page_bytes * (head_dim + 4) == narrow.page_bytes * head_dim * 4
    assert [wide.problem, narrow.problem] == ["", ""]
    assert narrow.num_blocks == (4 << 20) // narrow.page_bytes > wide.num_blocks


def test_fit_advises_it_where_it_makes_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "_ask", lambda questions: answers(FitQuestions(questions)))
    wide = answer(FitQuestion([resolved(dtype="bfloat16")])).plans[0].page_bytes
    found = fit_module.fit(
        "random-tiny", dtype="bfloat16", device="cpu", max_model_len=256, kv_cache_memory_bytes=12 * wide
    )
    assert "--kv-cache-dtype int8" in found.advice


def test_a_wrong_value_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype must be one of auto, int8, got 'fp8'"):
        CacheConfig(kv_cache_dtype="fp8")
    with pytest.raises(
        InvalidArgumentError,
        match=r"kv_cache_dtype must be 'auto' with device='cuda' \(only the CPU.*got 'int8'",
    ):
        EngineArgs(device="cuda", kv_cache_dtype="int8").create_engine_config(bound=True)


def test_on_a_gpu_it_is_refused_before_anything_is_loaded(
    int8_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = int8_config.model
    cuda, hf_config = torch.device("cuda"), load_hf_config(config)
    with pytest.raises(
        InvalidArgumentError, match=r"kv_cache_dtype must be 'auto' on cuda \(only the CPU has.*got 'int8'"
    ):
        resolve_precision(config, int8_config.cache, hf_config, cuda)
    assert resolve_precision(config, CacheConfig(), hf_config, CPU).kv_dtype is torch.float32
    monkeypatch.setattr(worker_module, "choose_device", lambda *_: cuda)
    worker = Worker(int8_config)
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype"):
        worker.init_device()
    assert not hasattr(worker, "model")


def test_without_compiled_kernels_it_is_refused_and_fit_says_so(
    int8_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_installed", lambda package: False)
    monkeypatch.setattr(loading, "select_products", lambda device: None)
    expected = r"kv_cache_dtype must be 'auto' on cpu \(llvmlite is not installed.*got 'int8'"
    with pytest.raises(InvalidArgumentError, match=expected):
        Worker(int8_config).init_device()
    (plan,) = answer(FitQuestion([resolved(kv_cache_dtype="int8")])).plans
    assert plan.problem.startswith("kv_cache_dtype must be 'auto' on cpu")
