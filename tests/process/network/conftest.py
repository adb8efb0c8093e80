"""Engines of one machine and on a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, SUPPORT_PATH, EngineUnderTest

from nbengine import LLM, AsyncLLM
from nbengine.config import ParallelConfig

StartEngine = Callable[..., EngineUnderTest]


@pytest.fixture
def start_networked(start_engine: StartEngine) -> StartEngine:
    """Start an engine with the fake executor that listens on 127.0.0.1."""

    def start(knobs: dict | None = None, *, size: int = 1, **config: Any) -> EngineUnderTest:
        parallel = ParallelConfig(
            distributed_executor_backend=FAKE_EXECUTOR,
            data_parallel_address="127.0.0.1",
            data_parallel_size=size,
        )
        return start_engine(knobs, parallel=parallel, **config)

    return start


@pytest.fixture
def start_frontend(no_leftovers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start an `AsyncLLM` or an `LLM` with the fake executor on 127.0.0.1; it is shut down after the test."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH)
    started: list[AsyncLLM | LLM] = []

    def start(kind: type[AsyncLLM | LLM], knobs: dict | None = None, **options: Any) -> Any:
        defaults = {
            "hf_overrides": {"vocab_size": 260, **(knobs or {})},
            "distributed_executor_backend": FAKE_EXECUTOR,
            "num_gpu_blocks_override": 64,
            "data_parallel_address": "127.0.0.1",
            "lease": 10.0,
        }
        started.append(kind(model="random-tiny", **defaults | options))
        return started[-1]

    yield start
    for frontend in started:
        frontend.shutdown()
