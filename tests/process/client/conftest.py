"""Engines with the fake executor (the next token is the last one plus 1), through the public frontends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_support.engine_under_test import FAKE_EXECUTOR, SUPPORT_PATH, wait_for

from nbengine import LLM, AsyncLLM
from nbengine.client.engines.directory import stop_engine
from nbengine.runtime.connection import ConnectionInfo

VOCAB_SIZE = 260
"""Of random-tiny, whose tokenizer these engines have: a token a byte, and 4 special ones."""

StartAsync = Callable[..., AsyncLLM]
StartLLM = Callable[..., LLM]
StartShared = Callable[..., Any]


def fake_options(**options: Any) -> dict[str, Any]:
    """Engine arguments for the fake executor; `knobs` are its own, see `FakeExecutor`."""
    knobs = {"vocab_size": VOCAB_SIZE, **options.pop("knobs", {})}
    defaults = {"distributed_executor_backend": FAKE_EXECUTOR, "num_gpu_blocks_override": 64, "lease": 10.0}
    return {"model": "random-tiny", "hf_overrides": knobs, **defaults, **options}


@pytest.fixture(autouse=True)
def fake_executor_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine's processes find the fake executor."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH, prepend=os.pathsep)


@pytest.fixture(scope="module")
def start_shared(no_leftovers_of_module: None) -> Iterator[StartShared]:
    """Start an `AsyncLLM` or an `LLM` for all tests of a file; it is shut down after the last one.

    A test takes it by way of `left_idle`, which checks that it leaves the engine as it was.
    """
    started: list[AsyncLLM | LLM] = []

    def start(kind: type[AsyncLLM | LLM], **options: Any) -> AsyncLLM | LLM:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", SUPPORT_PATH, prepend=os.pathsep)
            started.append(kind(**fake_options(**options)))
        return started[-1]

    yield start
    for frontend in started:
        frontend.shutdown()


@contextlib.contextmanager
def left_idle(frontend: AsyncLLM | LLM) -> Iterator[None]:
    """Wait behind a test until the engine that it shares has nothing to do, is awake, and has all of its blocks."""
    stats = frontend.stats_blocking if isinstance(frontend, AsyncLLM) else frontend.stats

    def is_idle() -> bool:
        return all(
            not engine.num_running_reqs + engine.num_waiting_reqs + engine.is_paused + engine.is_sleeping
            and engine.num_free_blocks == engine.num_blocks
            for engine in stats().engines
        )

    yield
    wait_for(is_idle, "the shared engine to be idle")


@pytest.fixture
def started_clients() -> list[AsyncLLM]:
    """List the frontends that `start_async` has started; a test that clears it gives up the last
    references."""
    return []


@pytest.fixture
def start_async(no_leftovers: None, started_clients: list[AsyncLLM]) -> Iterator[StartAsync]:
    """Start an `AsyncLLM`; it is shut down after the test."""

    def start(**options: Any) -> AsyncLLM:
        started_clients.append(AsyncLLM(**fake_options(**options)))
        return started_clients[-1]

    yield start
    for llm in started_clients:
        info: ConnectionInfo = llm.connection
        llm.shutdown()
        if info.host_alive:
            stop_engine(info)


@pytest.fixture
def started_llms() -> list[LLM]:
    """List the frontends that `start_llm` has started; a test that clears it gives up the last references."""
    return []


@pytest.fixture
def start_llm(no_leftovers: None, started_llms: list[LLM]) -> Iterator[StartLLM]:
    """Start an `LLM`; it is shut down after the test."""

    def start(**options: Any) -> LLM:
        started_llms.append(LLM(**fake_options(**options)))
        return started_llms[-1]

    yield start
    for llm in started_llms:
        llm.shutdown()


@pytest.fixture
def script(tmp_path: Path, no_leftovers: None) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Run a script in a process of its own, its output piped; it is killed after the test if it still runs."""
    running: list[subprocess.Popen[str]] = []

    def run(text: str) -> subprocess.Popen[str]:
        path = tmp_path / f"script_{len(running)}.py"
        path.write_text(f"OPTIONS = {fake_options()!r}\n{text}")
        process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()
