"""Engines of one machine and on a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, EngineUnderTest

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
