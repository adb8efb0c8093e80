"""The worker: what it loads, what memory it asks for, and what it refuses before it is too late."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nbengine.config import EngineConfig
from nbengine.errors import EngineStartError, ModelLoadError
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.cgroup import ControlGroup
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.worker_board import WorkerBoard
from nbengine.worker import worker as worker_module
from nbengine.worker.memory import budget as budget_module
from nbengine.worker.memory import layer_caches
from nbengine.worker.memory.limits import GIB
from nbengine.worker.threads import TorchThreads
from nbengine.worker.worker import Worker


@pytest.fixture
def free_memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Free bytes of the host as the worker sees them: change element 0."""
    free = [8 * GIB]
    monkeypatch.setattr(budget_module, "available_host_memory", lambda: free[0])
    return free


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch's number of threads and what it is set to, on a machine with 8 cores."""
    history = [8]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: history[-1])
    monkeypatch.setattr(torch, "set_num_threads", history.append)
    return history


def loaded(config: EngineConfig) -> Worker:
    worker = Worker(config)
    worker.init_device()
    worker.load_model()
    return worker


def test_a_worker_reports_what_it_loaded(tiny_config: EngineConfig) -> None:
    messages: list[Progress] = []
    worker = Worker(tiny_config, messages.append)
    worker.init_device()
    worker.load_model()
    # Llama with the dimensions of random-tiny, counted by hand.
    attention = 64 * 64 * 2 + 64 * 32 * 2
    parameters = 2 * 258 * 64 + 2 * (attention + 3 * 64 * 176 + 2 * 64) + 64
    assert worker.model_info() == {
        "device": "cpu",
        "dtype": "float32",
        "weights_bytes": 4 * parameters,
        "max_position_embeddings": 2048,
        "advised_max_model_len": 2048,
        "vocab_size": 258,
        "hidden_size": 64,
        "takes_prompt_embeds": True,
        "supported_tasks": ["generate", "embed", "score", "encode"],
    }
    assert {message.stage for message in messages} == {"load"}
    assert messages[-1].fraction == 1
    # 2 layers of keys and values, 2 heads of 16 float32 numbers, 4 tokens.
    assert worker.get_kv_cache_spec().page_size_bytes == 2 * 2 * 2 * 16 * 4 * 4


def test_it_writes_to_the_board_that_its_executor_has_made(tiny_config: EngineConfig, tmp_path: Path) -> None:
    board = WorkerBoard.create(tmp_path, 1)
    worker = Worker(tiny_config, files=ExecutorFiles(str(tmp_path), str(tmp_path), board=str(board.path)))
    board.unlink()
    worker.init_device()
    assert board.read()[0].memory_bytes == 0
    worker.load_model()
    assert board.read()[0].memory_bytes > 1 << 20
    assert worker.worker_info().weights_bytes == worker.model_info()["weights_bytes"]


def test_weights_that_do_not_fit_are_refused_before_they_are_read(
    tiny_config: EngineConfig, free_memory: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    free_memory[0] = 100_000
    monkeypatch.setattr(worker_module, "load_model", lambda *args: pytest.fail("read the weights"))
    with pytest.raises(EngineStartError, match="model 'random-tiny' does not fit on cpu"):
        loaded(tiny_config)


def test_the_cache_budget_follows_the_arguments(tiny_config: EngineConfig, free_memory: list[int]) -> None:
    def budget(**cache: int) -> int:
        return loaded(
            replace(tiny_config, cache=replace(tiny_config.cache, **cache))
        ).determine_available_memory()

    assert budget(kv_cache_memory_bytes=12345) == 12345
    assert budget(num_gpu_blocks_override=7) == 7 * 2048
    # Nothing asked for: no more than all requests can fill at the greatest length (8 requests of 96 tokens).
    assert budget() == 8 * 24 * 2048
    free_memory[0] = 8 * 10**5
    assert budget() == 2 * 10**5


def test_a_cache_that_does_not_fit_is_refused_instead_of_allocated(
    tiny_config: EngineConfig, free_memory: list[int]
) -> None:
    worker = loaded(tiny_config)
    free_memory[0] = 10 * 2048 - 1
    with pytest.raises(EngineStartError, match=r"10 blocks of 2 KiB .* lower kv_cache_memory_bytes"):
        worker.check_kv_cache_fits(10)


def test_a_failing_allocation_names_the_numbers(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = loaded(tiny_config)

    def out_of_memory(*arguments: object) -> torch.Tensor:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(layer_caches, "zeros_in_huge_pages", out_of_memory)
    with pytest.raises(
        EngineStartError, match=r"\(50 blocks\) on cpu; lower kv_cache.*Cannot alloc"
    ) as raised:
        worker.initialize_kv_cache(50)
    assert isinstance(raised.value.__cause__, OSError)


def test_more_requests_than_there_is_room_for_are_named(tiny_config: EngineConfig) -> None:
    worker = loaded(replace(tiny_config, scheduler=replace(tiny_config.scheduler, max_num_seqs=2**31 - 1)))
    with pytest.raises(EngineStartError, match=r"max_num_seqs=2147483647 requests .*; lower one of them: "):
        worker.initialize_kv_cache(50)


def test_a_small_cache_bounds_the_sequence_length(tiny_config: EngineConfig) -> None:
    worker = loaded(replace(tiny_config, model=replace(tiny_config.model, max_model_len=None)))
    worker.initialize_kv_cache(3)
    assert worker.model_runner._batch.token_ids.shape[1] == 12


def test_a_failing_load_gives_the_threads_back(
    tiny_config: EngineConfig, monkeypatch: pytest.MonkeyPatch, threads: list[int]
) -> None:
    def fail(*args: object) -> None:
        raise ModelLoadError("corrupt")

    monkeypatch.setattr(worker_module, "load_model", fail)
    with pytest.raises(ModelLoadError, match="corrupt"):
        UniProcExecutor(tiny_config)
    assert threads == [8, 1, 8]


@pytest.mark.parametrize(
    ("weights_bytes", "quota", "expected"),
    [(GIB, None, [8]), (GIB, 3, [8, 3, 8]), (GIB, 99, [8]), (1 << 20, None, [8, 1, 8])],
)
def test_threads_are_limited_by_quota_and_by_what_pays(
    weights_bytes: int,
    quota: int | None,
    expected: list[int],
    threads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ControlGroup, "cpu_limit", lambda self: quota)
    limiter = TorchThreads()
    limiter.limit(weights_bytes)
    limiter.restore()
    limiter.restore()
    assert threads == expected


def test_the_users_number_of_threads_stays(threads: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    TorchThreads().limit(1)
    assert threads == [8]
