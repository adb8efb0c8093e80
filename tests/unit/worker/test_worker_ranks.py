"""Workers among others: their devices, how they join, and the memory and cores that they have among them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.distributed.communicator import SINGLE, ParallelState, SingleRank
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.errors import EngineStartError, InvalidArgumentError, NBEngineError
from nbengine.models.loading import weights_bytes_of
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.worker import joining
from nbengine.worker import worker as worker_module
from nbengine.worker.memory import budget as budget_module
from nbengine.worker.memory.limits import CPU_CAP_BYTES, GIB
from nbengine.worker.threads import TorchThreads
from nbengine.worker.worker import Worker

SIZES = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
"""Tensor- and pipeline-parallel sizes for 4 heads, 2 KV heads and 2 layers."""


class Joined(ParallelState):
    """The others, who are not there."""

    closed = False

    def close(self) -> None:
        object.__setattr__(self, "closed", True)


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """List the arguments with which workers have joined."""
    calls: list[dict[str, Any]] = []

    def join(layout: RankLayout, device: torch.device, **place: Any) -> ParallelState:
        calls.append({"layout": layout, "device": device, **place})
        return Joined(layout, SingleRank())

    monkeypatch.setattr(joining, "init_parallel", join)
    return calls


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of the host as the workers see them: change element 0."""
    free = [8 * GIB]
    monkeypatch.setattr(budget_module, "available_host_memory", lambda: free[0])
    return free


def among_others(config: EngineConfig, tp_size: int, pp_size: int, **cache: Any) -> EngineConfig:
    parallel = ParallelConfig(
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        distributed_init_method="file:///nowhere/meeting",
    )
    return replace(config, parallel=parallel, cache=replace(config.cache, **cache))


def started(config: EngineConfig) -> list[Worker]:
    """Workers of all ranks, one after the other, with their weights loaded."""
    files = ExecutorFiles("/nowhere/sockets", "/nowhere/memory")
    workers = [Worker(config, None, layout, files) for layout in layouts(config.parallel)]
    for worker in workers:
        worker.init_device()
        worker.load_model()
    return workers


def test_a_worker_joins_the_others_before_it_looks_at_memory(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    joined_when_looked: list[int] = []

    def look() -> int:
        joined_when_looked.append(len(joins))
        return 8 * GIB

    monkeypatch.setattr(budget_module, "available_host_memory", look)
    config = among_others(tiny_config, 2, 1)
    worker, other = started(config)
    assert joined_when_looked == [1, 2]
    assert [call["layout"].rank for call in joins] == [0, 1]
    assert joins[0]["init_method"] == "file:///nowhere/meeting"
    assert joins[0]["directory"] == "/nowhere/memory"
    assert joins[0]["max_tensor_bytes"] == config.scheduler.max_num_batched_tokens * 64 * 4
    state = worker._parallel
    assert isinstance(state, Joined)
    worker.shutdown()
    assert state.closed
    other.shutdown()


def test_a_worker_alone_joins_nobody_unless_it_is_told_where(
    tiny_config: EngineConfig, joins: list[dict[str, Any]]
) -> None:
    for config in (tiny_config, among_others(tiny_config, 1, 1)):
        worker = Worker(config)
        worker.init_device()
        assert worker._parallel is SINGLE, "in the process of its engine core, which has no files for it"
    started(among_others(tiny_config, 1, 1))
    assert [call["layout"].world_size for call in joins] == [1]


def test_a_worker_among_others_must_know_where_they_meet(tiny_config: EngineConfig) -> None:
    config = among_others(tiny_config, 2, 1)
    with pytest.raises(NBEngineError, match="TP1: a worker among others needs a place"):
        Worker(config, None, RankLayout(1, 2)).init_device()


def test_sizes_that_do_not_divide_the_model_are_refused_before_anyone_is_joined(
    tiny_config: EngineConfig, joins: list[dict[str, Any]]
) -> None:
    for sizes, message in (((3, 1), "1, 2 or 4 for this model"), ((1, 3), "at most 2, the number of")):
        with pytest.raises(InvalidArgumentError, match=message):
            started(among_others(tiny_config, *sizes))
    assert not joins


def test_each_rank_has_a_gpu_of_its_own(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB, 2 * GIB))
    monkeypatch.setattr(worker_module, "WorkerMeter", lambda row, device: None)
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    config = among_others(tiny_config, 2, 2)
    for layout in layouts(config.parallel):
        Worker(config, None, layout, ExecutorFiles("", "")).init_device()
    assert [str(device) for device in chosen] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert [call["device"] for call in joins] == chosen
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(
        EngineStartError,
        match="tensor_parallel_size=2 x pipeline_parallel_size=2 needs 4 GPUs, and there are 3",
    ):
        Worker(config, None, RankLayout(1, 2, 1, 2), ExecutorFiles("", "")).init_device()


def in_core(config: EngineConfig, rank: int, cores: int, **parallel: Any) -> EngineConfig:
    """The configuration of one engine core of several."""
    own = replace(config.parallel, data_parallel_rank=rank, data_parallel_size=cores, **parallel)
    return replace(config, parallel=own)


@pytest.mark.parametrize("workers", [1, 2])
def test_engine_cores_take_the_gpus_one_after_the_other_unless_ray_has_given_them_theirs(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(joining, "resolve_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2 * workers)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    one = tiny_config if workers == 1 else among_others(tiny_config, 2, 1)
    files = None if workers == 1 else ExecutorFiles("", "")

    def chosen(config: EngineConfig) -> list[str]:
        return [str(joining.choose_device(config, each, files)) for each in layouts(config.parallel)]

    numbers = [f"cuda:{number}" for number in range(2 * workers)]
    assert chosen(in_core(one, 0, 2)) + chosen(in_core(one, 1, 2)) == numbers
    with pytest.raises(
        EngineStartError, match=f"needs {3 * workers} GPUs for engine core 2 and those before"
    ):
        chosen(in_core(one, 2, 3))
    by_ray = chosen(in_core(one, 2, 3, data_parallel_backend="ray"))
    assert by_ray == (["cuda"] if workers == 1 else numbers[:2])


def test_engine_cores_of_one_machine_share_the_default_budget_and_its_cores(
    tiny_config: EngineConfig,
    joins: list[dict[str, Any]],
    free_memory: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(tiny_config, model=replace(tiny_config.model, max_model_len=None))
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=10**4))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    shares: list[int] = []
    monkeypatch.setattr(TorchThreads, "limit", lambda self, weights_bytes, ranks: shares.append(ranks))

    def budget(config: EngineConfig) -> int:
        (worker,) = started(config)
        available = worker.determine_available_memory()
        worker.shutdown()
        return available

    free_memory[0] = 4 * 10**9
    alone = budget(in_core(config, 0, 1))
    assert alone == 10**9
    assert [budget(in_core(config, rank, 4)) for rank in range(4)] == [alone // 4] * 4
    assert budget(in_core(config, 3, 4, data_parallel_backend="ray")) == alone
    assert shares == [1, 4, 4, 4, 4, 1]
    asked = replace(config, cache=replace(config.cache, kv_cache_memory_bytes=10**6))
    assert budget(in_core(asked, 1, 4)) == 10**6, "what is asked for is one engine core's"


@pytest.mark.parametrize(("tp_size", "pp_size"), SIZES)
def test_ranks_on_a_cpu_keep_together_to_the_budget_of_one(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], free_memory: list[int], tp_size: int, pp_size: int
) -> None:
    config = replace(tiny_config, model=replace(tiny_config.model, max_model_len=None))
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=10**4))
    workers = started(among_others(config, tp_size, pp_size))
    pages = [worker.get_kv_cache_spec().page_size_bytes for worker in workers]
    assert sum(pages) == 2048 * max(1, tp_size // 2), "with more ranks than KV heads some are held twice"
    for free, budget in ((4 * 10**9, 10**9), (64 * GIB, CPU_CAP_BYTES)):
        free_memory[0] = free
        available = [worker.determine_available_memory() for worker in workers]
        blocks = {num_bytes // page for num_bytes, page in zip(available, pages, strict=True)}
        assert blocks == {budget // sum(pages)}


def test_bytes_asked_for_are_those_of_all_ranks_on_a_cpu_and_a_count_is_a_count(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], free_memory: list[int]
) -> None:
    asked = started(among_others(tiny_config, 2, 2, kv_cache_memory_bytes=100 * 2048))
    assert [worker.determine_available_memory() for worker in asked] == [25 * 2048] * 4
    counted = started(among_others(tiny_config, 2, 2, num_gpu_blocks_override=7))
    assert [worker.determine_available_memory() for worker in counted] == [7 * 512] * 4


def test_what_all_ranks_are_about_to_take_must_fit(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], free_memory: list[int]
) -> None:
    config = among_others(tiny_config, 2, 2)
    workers = started(config)
    hf_config = workers[0].hf_config
    weights = sum(weights_bytes_of(hf_config, torch.float32, layout) for layout in layouts(config.parallel))
    assert weights == sum(worker.model.weights_bytes for worker in workers)
    free_memory[0] = 10 * 2048
    for worker in workers:
        worker.check_kv_cache_fits(10)
        worker.initialize_kv_cache(10)
    free_memory[0] -= 1
    with pytest.raises(EngineStartError, match=r"KV cache does not fit on cpu \(4 workers together\): 10 bl"):
        workers[3].check_kv_cache_fits(10)
    free_memory[0] = weights
    started(config)
    free_memory[0] -= 1
    with pytest.raises(EngineStartError, match=r"does not fit on cpu \(4 workers together\): its weights"):
        started(config)


def test_all_ranks_look_before_one_of_them_wakes_up(
    tiny_config: EngineConfig, joins: list[dict[str, Any]], free_memory: list[int]
) -> None:
    workers = started(among_others(tiny_config, 2, 1))
    weights = sum(worker.model.weights_bytes for worker in workers)
    for worker in workers:
        worker.initialize_kv_cache(10)
        worker.sleep(2)
    for tag, needed in (("weights", weights), ("kv_cache", 10 * 2048)):
        free_memory[0] = needed
        for worker in workers:
            worker.check_wake_up(tag)
        free_memory[0] -= 1
        for worker in workers:
            with pytest.raises(EngineStartError, match="2 workers together"):
                worker.check_wake_up(tag)
        for worker in workers:
            worker.wake_up(tag)
            worker.check_wake_up("weights")


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, [8]), (2, [8, 4]), (3, [8, 2]), (9, [8, 1])])
def test_ranks_divide_the_cores(num_ranks: int, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    history = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: history[-1])
    monkeypatch.setattr(torch, "set_num_threads", history.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    TorchThreads().limit(GIB, num_ranks)
    assert history == expected
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    TorchThreads().limit(GIB, num_ranks)
    assert history == expected
