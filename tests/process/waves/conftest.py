"""Engines in lock step: real hosts and cores, with models whose batches need one another."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from process_support.engine_under_test import EngineUnderTest, fake_config, wait_for
from process_support.lock_step_executor import (
    ASYNC_LOCK_STEP_EXECUTOR,
    LOCK_STEP_EXECUTOR,
    Meeting,
)
from process_support.raw_client import DEADLINE, RawClient

from nbengine.config import CacheConfig, ParallelConfig

EXECUTORS = {"one-batch": LOCK_STEP_EXECUTOR, "two-batches": ASYNC_LOCK_STEP_EXECUTOR}


class LockStepEngine(EngineUnderTest):
    """An engine of several cores, and a look at the calls that they have made of their models."""

    def __init__(self, num_ranks: int, meeting: str, executor: str, knobs: dict) -> None:
        config = fake_config(
            {"meeting": meeting, "max_position_embeddings": 4096, "vocab_size": 10_000} | knobs,
            cache=CacheConfig(num_gpu_blocks_override=512),
            parallel=ParallelConfig(data_parallel_size=num_ranks, distributed_executor_backend=executor),
        )
        self.num_ranks = num_ranks
        self._meeting = Meeting(meeting, 0, num_ranks)
        super().__init__(dataclasses.replace(config, model=dataclasses.replace(config.model, is_moe=True)))

    def attached(self) -> RawClient:
        """A client, when all cores are ready."""
        return self.client().attach()

    def cores(self) -> list[psutil.Process]:
        """The processes of the cores, by rank."""
        host = psutil.Process(self.host.pid)
        wait_for(lambda: len(host.children()) == self.num_ranks, "all engine cores")
        return sorted(host.children(), key=lambda core: int(core.name().split()[2]))

    def num_batches(self) -> list[int]:
        """Return how many batches each core has begun."""
        return [self._meeting.num_batches(rank) for rank in range(self.num_ranks)]


StartLockStep = Callable[..., LockStepEngine]


@pytest.fixture
def start_with(no_leftovers: None, tmp_path: Path) -> Iterator[StartLockStep]:
    """Start an engine of some cores with an executor."""
    engines: list[LockStepEngine] = []

    def start_engine(executor: str, num_ranks: int, knobs: dict | None = None) -> LockStepEngine:
        meeting = str(tmp_path / f"meeting-{len(engines)}")
        engines.append(LockStepEngine(num_ranks, meeting, executor, knobs or {}))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture(params=EXECUTORS)
def start(request: pytest.FixtureRequest, start_with: StartLockStep) -> StartLockStep:
    """Start an engine of some cores, with one batch or two in flight."""
    return functools.partial(start_with, EXECUTORS[request.param])


@pytest.fixture(scope="module", params=EXECUTORS)
def shared_pair(
    request: pytest.FixtureRequest, no_leftovers_of_module: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LockStepEngine]:
    """Two cores for all tests of a file, with one batch or two in flight."""
    meeting = str(tmp_path_factory.mktemp("pair") / "meeting")
    engine = LockStepEngine(2, meeting, EXECUTORS[request.param], {"step_seconds": 0.002})
    try:
        engine.wait_ready(3 * DEADLINE)
        yield engine
    finally:
        engine.close()


@pytest.fixture
def pair(shared_pair: LockStepEngine) -> Iterator[LockStepEngine]:
    """Two cores, for the tests that leave them awake and at rest; their clients leave after each test."""
    yield shared_pair
    while shared_pair.clients:
        shared_pair.clients.pop().leave()


@pytest.fixture
def start_simple(start_with: StartLockStep) -> StartLockStep:
    """Start an engine of some cores, with one batch in flight."""
    return functools.partial(start_with, LOCK_STEP_EXECUTOR)
