"""The in-process executor, with a worker that records its calls."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from nbengine.errors import (
    EngineDeadError,
    EngineStartError,
    InvalidArgumentError,
    NBEngineError,
)
from nbengine.executor.choice import executor_class
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.executor.ray import RayExecutor
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.ipc.control_messages import Progress
from nbengine.models.checkpoints.tiny import random_tiny
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from nbengine.worker.memory import budget as budget_module


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    directory = random_tiny(tmp_path_factory.mktemp("models"), seed=0)
    return EngineConfig(
        model=ModelConfig(
            "random-tiny",
            device="cpu",
            directory=str(directory),
            weights=(str(directory / "model.safetensors"),),
        ),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=8),
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=16),
    )


@pytest.fixture
def executor(config: EngineConfig) -> Iterator[UniProcExecutor]:
    made = UniProcExecutor(config)
    yield made
    made.shutdown()


def one_request(token_ids: list[int], block_ids: list[int] | None = None) -> SchedulerOutput:
    new = NewRequestData("a", token_ids, SamplingParams(temperature=0), block_ids or [0], 0)
    return SchedulerOutput([new], CachedRequestData(), {"a": len(token_ids)}, len(token_ids), set())


def test_is_what_a_configuration_without_backend_gets(config: EngineConfig) -> None:
    assert executor_class(config) is UniProcExecutor
    assert executor_class(replace(config, parallel=ParallelConfig(distributed_executor_backend="uni")))


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(distributed_executor_backend="mp"),
        ParallelConfig(tensor_parallel_size=2),
        ParallelConfig(pipeline_parallel_size=3),
    ],
)
def test_several_workers_or_the_mp_backend_have_processes_of_their_own(
    config: EngineConfig, parallel: ParallelConfig
) -> None:
    assert executor_class(replace(config, parallel=parallel)) is MultiprocExecutor


def test_the_ray_backend_has_its_own(config: EngineConfig) -> None:
    parallel = ParallelConfig(distributed_executor_backend="ray")
    assert executor_class(replace(config, parallel=parallel)) is RayExecutor


def test_steps_are_executed_and_sampled_with_and_without_blocking(executor: UniProcExecutor) -> None:
    (spec,) = executor.get_kv_cache_specs()
    assert executor.determine_available_memory() == [8 * spec.page_size_bytes]
    executor.initialize_kv_cache(8)
    assert executor.max_concurrent_batches == 1
    assert executor.execute_model(one_request([1, 2, 3])) is None
    first = executor.sample_tokens()
    assert first.req_ids == ["a"]
    again = CachedRequestData(["a"], set(), [None], [3])
    future = executor.execute_model(SchedulerOutput([], again, {"a": 1}, 1, set()), non_block=True)
    assert isinstance(future, Future)
    assert future.done()
    assert future.result() is None
    assert len(executor.sample_tokens(None).sampled_token_ids[0]) == 1


def test_calls_workers_by_name(executor: UniProcExecutor) -> None:
    assert executor.collective_rpc("model_info", unique_reply_rank=0) == executor.model_info()
    with pytest.raises(InvalidArgumentError, match="unique_reply_rank must be None or from 0 to 0, got 1"):
        executor.collective_rpc("model_info", unique_reply_rank=1)
    assert executor.collective_rpc("model_info") == [executor.model_info()]
    future = executor.collective_rpc("model_info", non_block=True)
    assert future.result() == [executor.model_info()]
    for name in ("no_such_method", "_max_model_len", "device"):
        with pytest.raises(NBEngineError, match=f"no method '{name}'"):
            executor.collective_rpc(name)


def test_every_layer_of_a_step_is_counted(executor: UniProcExecutor) -> None:
    executor.initialize_kv_cache(8)
    (before,) = executor.worker_pulses()
    executor.execute_model(one_request([1, 2, 3]))
    executor.sample_tokens()
    (after,) = executor.worker_pulses()
    assert after.ticks - before.ticks == executor._worker.model.config.num_layers
    assert not after.waits
    assert executor.check_health() is None


def test_failures_reach_the_caller_as_they_were(executor: UniProcExecutor) -> None:
    executor.initialize_kv_cache(8)
    bad = one_request([1, 2, 3], block_ids=[10**6])
    bad.num_scheduled_tokens = {"unknown": 3}
    with pytest.raises(KeyError, match="unknown"):
        executor.execute_model(bad)
    future = executor.execute_model(bad, non_block=True)
    assert isinstance(future.exception(), KeyError)
    with pytest.raises(NBEngineError, match="no step waits"):
        executor.collective_rpc("sample_tokens")


def test_shutdown_frees_model_and_cache_and_may_be_repeated(config: EngineConfig) -> None:
    executor = UniProcExecutor(config)
    executor.initialize_kv_cache(8)
    executor.execute_model(one_request([1, 2, 3]))
    executor.sample_tokens()
    executor.check_health()
    runner = executor._worker.model_runner
    tensors = [weakref.ref(runner._kv_caches[0]), weakref.ref(runner._model.embed_tokens.weight.tensor)]
    del runner
    executor.shutdown()
    executor.shutdown()
    assert [tensor() for tensor in tensors] == [None, None]
    for call in (executor.check_health, executor.sample_tokens, executor.model_info):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


def test_a_model_that_does_not_fit_is_an_error_of_the_start(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_module, "available_host_memory", lambda: 1000)
    with pytest.raises(EngineStartError, match="does not fit"):
        UniProcExecutor(config)


def test_reports_progress_of_loading(config: EngineConfig) -> None:
    messages: list[Progress] = []
    UniProcExecutor(config, messages.append).shutdown()
    assert [message.stage for message in messages] == ["load"] * len(messages)
    assert messages[-1].fraction == 1


def test_its_worker_is_seen_without_a_call_to_it(
    executor: UniProcExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor.initialize_kv_cache(8)
    executor.execute_model(SchedulerOutput([], CachedRequestData(), {}, 0, set()))
    executor.execute_model(one_request([1, 2, 3]))
    executor.sample_tokens()
    (info,) = executor.worker_info()
    page_size = executor.get_kv_cache_specs()[0].page_size_bytes
    assert (info.rank, info.tp_rank, info.pp_rank, info.pid) == (0, 0, 0, os.getpid())
    assert (info.device, info.first_layer, info.num_layers) == ("cpu", 0, 2)
    assert (info.weights_bytes, info.kv_cache_bytes) == (
        executor.model_info()["weights_bytes"],
        8 * page_size,
    )
    monkeypatch.setattr(executor, "collective_rpc", None)
    (stats,) = executor.worker_stats()
    assert (stats.rank, stats.num_steps) == (0, 1)
    assert 0 < stats.step_seconds < 60
    assert stats.memory_bytes > info.weights_bytes
