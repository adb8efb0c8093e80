"""Executors in the test's own process, with fake workers in theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.engine_under_test import SUPPORT_PATH
from process_support.fake_worker import FakeWorkersExecutor, StartExecutor, fake_workers_config

from nbengine.runtime.executor_files import ExecutorFiles


@pytest.fixture(scope="module", autouse=True)
def support_path() -> Iterator[None]:
    """Let workers find the fake worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SUPPORT_PATH)
        yield


def make_files(directory: Path) -> ExecutorFiles:
    for name in ("s", "m"):
        (directory / name).mkdir(mode=0o700)
    log = str(directory / "engine.log")
    return ExecutorFiles(str(directory / "s"), str(directory / "m"), log, engine="tested")


@pytest.fixture
def files(tmp_path: Path) -> ExecutorFiles:
    return make_files(tmp_path)


@pytest.fixture
def start_executor(no_leftovers: None, files: ExecutorFiles) -> Iterator[StartExecutor]:
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


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeWorkersExecutor]:
    """Two workers for the tests that leave them as they were."""
    executor = FakeWorkersExecutor(
        fake_workers_config(2), None, make_files(tmp_path_factory.mktemp("shared"))
    )
    yield executor
    executor.shutdown()
