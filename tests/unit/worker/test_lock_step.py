"""A worker among engine cores in lock step: what it counts with before the others are there, and what it does without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from nbengine.distributed.communicator import SingleGroup
from nbengine.distributed.data_parallel import RehearsalGroup
from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError, InvalidArgumentError, NBEngineError, PeerDiedError
from nbengine.executor import uniproc
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.models.checkpoints.files import resolve_model
from nbengine.models.loading import weights_bytes_of
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.worker.memory import budget as budget_module
from nbengine.worker.worker import Worker


@pytest.fixture(scope="module")
def moe_config() -> EngineConfig:
    model = resolve_model(ModelConfig("random-tiny-moe", dtype="float32", device="cpu", max_model_len=64))
    return EngineConfig(model=model, cache=CacheConfig(num_gpu_blocks_override=8))


def in_core(config: EngineConfig, rank: int, cores: int, **parallel: Any) -> EngineConfig:
    return replace(
        config, parallel=ParallelConfig(data_parallel_rank=rank, data_parallel_size=cores, **parallel)
    )


def worker_of(config: EngineConfig, files: ExecutorFiles | None = None) -> Worker:
    return Worker(config, None, RankLayout.of(0, config.parallel), files)


def test_a_worker_that_joins_later_has_room_for_its_weights_and_reads_nothing(
    moe_config: EngineConfig,
) -> None:
    # Their files are gone.
    config = replace(moe_config, model=replace(moe_config.model, weights=("/nowhere/model.safetensors",)))
    config = in_core(config, 2, 3, enable_expert_parallel=True, data_parallel_joins_later=True)
    worker = worker_of(config)
    worker.init_device()
    worker.load_model()
    assert worker.model.weights_bytes == weights_bytes_of(
        worker.hf_config, worker.precision.dtype, RankLayout(dp_rank=2, dp_size=3, expert_parallel=True)
    )
    assert not any(weight.any() for weight in worker.model.parameters())
    assert worker._parallel.dp.size == 1
    worker.shutdown()


def test_weights_of_all_that_load_at_once_must_fit(
    moe_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that join later find the others' weights loaded; the memory that is free is all theirs."""
    whole = worker_of(moe_config)
    whole.init_device()
    needed = weights_bytes_of(whole.hf_config, whole.precision.dtype)
    monkeypatch.setattr(budget_module, "available_host_memory", lambda: needed + 1)
    later = worker_of(in_core(moe_config, 1, 2, data_parallel_joins_later=True))
    for worker in (whole, later):
        worker.init_device()
        worker.load_model()
        worker.shutdown()
    monkeypatch.setattr("nbengine.worker.joining.join_data_parallel", lambda *args, **named: None)
    together = worker_of(in_core(moe_config, 1, 2), ExecutorFiles("", "/nowhere"))
    together.init_device()
    # Both have all of what is not experts.
    with pytest.raises(EngineStartError, match=r"does not fit on cpu \(2 workers together\)"):
        together.load_model()


def test_engine_cores_in_lock_step_need_a_place_to_meet_at(moe_config: EngineConfig) -> None:
    with pytest.raises(NBEngineError, match="engine core 1: a worker among others needs a place"):
        worker_of(in_core(moe_config, 1, 2)).init_device()


@pytest.mark.parametrize("place", [None, "file:///elsewhere/group-2"])
def test_they_meet_in_the_engines_memory_unless_they_are_told_where(
    moe_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, place: str | None
) -> None:
    joins: list[dict[str, Any]] = []

    def join(layout: RankLayout, device: torch.device, **named: Any) -> None:
        joins.append({"layout": layout, **named})

    monkeypatch.setattr("nbengine.worker.joining.join_data_parallel", join)
    config = in_core(moe_config, 1, 2, data_parallel_init_method=place)
    worker_of(config, ExecutorFiles("", "/engine/memory", engine="name")).init_device()
    (call,) = joins
    assert call["init_method"] == (place or "file:///engine/memory/rendezvous-cores")
    assert (call["engine"], call["directory"]) == ("name", "/engine/memory")
    assert (call["layout"].dp_rank, call["layout"].dp_size) == (1, 2)
    hidden_size = 64
    assert call["max_tensor_bytes"] == config.scheduler.max_num_batched_tokens * hidden_size * 4


class Absent(SingleGroup):
    """A group of four engine cores of which the other three never answer."""

    size = 4

    def gather(self, x: Tensor) -> Tensor:
        raise AssertionError("waited for the others")

    reduce_scatter = gather


def test_trying_out_the_largest_step_waits_for_nobody(
    moe_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = worker_of(in_core(moe_config, 1, 4, data_parallel_joins_later=True))
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(8)
    worker._parallel.dp.switch(Absent())  # type: ignore[union-attr]
    sizes: set[int] = set()
    scatter = RehearsalGroup.reduce_scatter

    def noted(group: RehearsalGroup, x: Tensor) -> Tensor:
        sizes.add(len(x))
        return scatter(group, x)

    monkeypatch.setattr(RehearsalGroup, "reduce_scatter", noted)
    worker.model_runner.profile_run(64)  # type: ignore[union-attr]
    assert sizes == {4 * moe_config.scheduler.max_num_batched_tokens}
    worker.shutdown()


def test_a_number_of_engine_cores_that_does_not_divide_the_experts_is_refused_and_changes_nothing(
    moe_config: EngineConfig,
) -> None:
    worker = worker_of(moe_config)
    worker.init_device()
    worker.load_model()
    before = [weight.data_ptr() for weight in worker.model.parameters()]
    with pytest.raises(InvalidArgumentError, match=r"1, 2, 4, 8, 16, 32 or 64 for this model .* got 3"):
        worker.reconfigure_data_parallel(1, 3, "file:///nowhere")
    assert worker.config.parallel.data_parallel_size == worker.layout.dp_size == 1
    assert [weight.data_ptr() for weight in worker.model.parameters()] == before
    worker.shutdown()


def test_an_engine_of_one_core_agrees_with_itself(moe_config: EngineConfig) -> None:
    executor = UniProcExecutor(moe_config)
    assert executor.all_reduce_unfinished(True) is True
    assert executor.all_reduce_unfinished(False) is False
    executor.initialize_kv_cache(8)
    executor.execute_dummy_batch().result()
    executor.shutdown()


def test_a_lost_peer_is_told_of_after_its_own_end_can_be_known(
    moe_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = UniProcExecutor(moe_config)
    slept: list[float] = []
    monkeypatch.setattr(uniproc.time, "sleep", slept.append)

    def lose() -> None:
        raise PeerDiedError("the worker of rank 0 of engine core 1 is gone")

    monkeypatch.setattr(executor._worker, "execute_dummy_batch", lose)
    with pytest.raises(PeerDiedError):
        executor.collective_rpc("execute_dummy_batch")
    assert slept == [uniproc.SETTLE_SECONDS]
    executor.shutdown()
