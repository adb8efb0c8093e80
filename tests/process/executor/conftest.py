"""Executors in the test's own process, with fake workers in theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import SUPPORT_PATH
from process_support.fake_worker import FakeWorkersExecutor

from nbengine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from nbengine.executor.files import ExecutorFiles

StartExecutor = Callable[..., FakeWorkersExecutor]


def fake_workers_config(tp: int = 1, pp: int = 1, *, is_async: bool = False, **knobs) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("fake", hf_overrides=knobs),
        cache=CacheConfig(num_gpu_blocks_override=64),
        scheduler=SchedulerConfig(async_scheduling=is_async),
        parallel=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            distributed_executor_backend="process_support.fake_worker:FakeWorkersExecutor",
        ),
    )


@pytest.fixture(autouse=True)
def support_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers find the fake worker."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)


@pytest.fixture
def files(tmp_path: Path) -> ExecutorFiles:
    for name in ("s", "m"):
        (tmp_path / name).mkdir(mode=0o700)
    return ExecutorFiles(
        str(tmp_path / "s"), str(tmp_path / "m"), str(tmp_path / "engine.log"), engine="tested"
    )


@pytest.fixture
def start_executor(no_leftovers: None, files: ExecutorFiles, support_path: None) -> Iterator[StartExecutor]:
    """Start an executor; it is ended after the test."""
    executors: list[FakeWorkersExecutor] = []

    def start(tp: int = 1, pp: int = 1, *, progress=None, is_async: bool = False, **knobs):
        config = fake_workers_config(tp, pp, is_async=is_async, **knobs)
        executor = FakeWorkersExecutor(config, progress, files)
        executors.append(executor)
        return executor

    yield start
    for executor in executors:
        executor.shutdown()
