"""A worker that gives its memory back, and has the same model afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError, ModelLoadError
from nbengine.models.layers.regions import Region
from nbengine.scheduler.output import CachedRequestData, SchedulerOutput
from nbengine.worker.memory import budget as budget_module
from nbengine.worker.memory.offload import WeightsOffload
from nbengine.worker.worker import Worker


@pytest.fixture
def worker(tiny_config: EngineConfig) -> Worker:
    worker = Worker(tiny_config)
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(16)
    return worker


def storages(worker: Worker) -> list[torch.UntypedStorage]:
    return [weight.untyped_storage() for weight in worker.model.parameters()]


def contents(worker: Worker) -> list[torch.Tensor]:
    return [weight.clone() for weight in worker.model.parameters()]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, left, right))


@pytest.mark.parametrize("levels", [(1,), (2,), (1, 2)])
def test_weights_and_kv_cache_come_back_as_they_were(worker: Worker, levels: tuple[int, ...]) -> None:
    before = contents(worker)
    shapes = [cache.shape for cache in worker.model_runner._kv_caches]
    weights = storages(worker)
    for level in levels:
        worker.sleep(level)
    assert worker.model_runner._kv_caches == []
    assert any(storage.nbytes() for storage in weights) == (levels == (1,))
    worker.wake_up("weights")
    worker.wake_up("kv_cache")
    assert same(contents(worker), before)
    assert [cache.shape for cache in worker.model_runner._kv_caches] == shapes
    assert not any(cache.any() for cache in worker.model_runner._kv_caches)


def test_a_sleeping_worker_still_forgets_requests(worker: Worker) -> None:
    worker.sleep(2)
    plan = SchedulerOutput([], CachedRequestData(), {}, 0, {"gone"})
    output = worker.execute_model(plan)
    assert output is not None
    assert output.req_ids == []


@pytest.mark.parametrize(("tag", "what"), [("weights", "model"), ("kv_cache", "KV cache")])
def test_memory_that_others_have_taken_is_an_error_and_can_be_tried_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, tag: str, what: str
) -> None:
    before = contents(worker)
    worker.sleep(2)
    with monkeypatch.context() as patch:
        patch.setattr(budget_module, "available_host_memory", lambda: 100)
        with pytest.raises(EngineStartError, match=f"{what} .*does not fit"):
            worker.check_wake_up(tag)
    worker.wake_up("weights")
    worker.wake_up("kv_cache")
    assert same(contents(worker), before)


def test_a_worker_that_could_not_fall_asleep_wakes_up_with_what_it_has(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = list(worker.model_runner._kv_caches)
    monkeypatch.setattr(budget_module, "available_host_memory", lambda: 100)
    for tag in ("weights", "kv_cache"):
        worker.check_wake_up(tag)
        worker.wake_up(tag)
    assert list(map(id, worker.model_runner._kv_caches)) == list(map(id, caches))


def test_files_that_have_changed_are_an_error_and_can_be_put_back(worker: Worker, tmp_path: Path) -> None:
    before = contents(worker)
    worker.sleep(2)
    model = worker.config.model
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"nothing")
    worker.config = replace(worker.config, model=replace(model, weights=(str(broken),)))
    with pytest.raises(ModelLoadError, match="truncated, corrupt"):
        worker.wake_up("weights")
    worker.config = replace(worker.config, model=model)
    worker.wake_up("weights")
    assert same(contents(worker), before)


def test_views_of_one_storage_are_emptied_and_filled_once() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    offload = WeightsOffload([base[:2], base[2:], torch.ones(5)])
    offload.drop()
    assert offload.num_missing_bytes == 17 * 4
    assert not offload.restore()
    assert offload.num_missing_bytes == 0
    base.fill_(1.0)
    assert base[2:].sum() == 4


def test_weights_on_the_host_come_back_from_there() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    offload = WeightsOffload([base[:2], base[2:]])
    offload.move_to_host()
    assert offload.num_missing_bytes == 12 * 4
    assert offload.restore()
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4))
    offload.move_to_host()
    offload.drop()
    assert not offload.restore()


def test_weights_that_have_stayed_are_left_alone() -> None:
    region = Region(8192)
    region.tensor.fill_(7)
    offload = WeightsOffload([region.tensor])
    assert offload.num_missing_bytes == 0
    assert offload.restore()
    assert region.tensor.eq(7).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("level", [1, 2])
def test_a_gpu_gets_its_memory_back_and_the_weights_return(tiny_config: EngineConfig, level: int) -> None:
    worker = Worker(replace(tiny_config, model=replace(tiny_config.model, device="cuda")))
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(4096)
    before, allocated = contents(worker), torch.cuda.memory_allocated()
    copies = sum(weight.nbytes for weight in before)
    worker.sleep(level)
    freed = allocated - torch.cuda.memory_allocated()
    assert freed >= 0.9 * (
        worker.model_runner._num_blocks * worker.get_kv_cache_spec().page_size_bytes + copies
    )
    worker.wake_up("weights")
    worker.wake_up("kv_cache")
    assert same(contents(worker), before)
    assert torch.cuda.memory_allocated() == allocated
