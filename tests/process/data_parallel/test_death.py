"""kill -9 of any process of engine cores in lock step: one clear error soon, with the first cause, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_processes import is_running, processes_of
from process_support.absent import ABSENT_CORE
from process_support.engine_under_test import SUPPORT_PATH, wait_for
from process_support.lock_step_executor import LOCK_STEP_EXECUTOR
from stopping import stop

from nbengine import AsyncLLM, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.errors import EngineDeadError, EngineStartError
from nbengine.ipc.control_messages import Progress
from nbengine.runtime.connection import connection_file
from nbengine.sampling_params import RequestOutputKind
from tests.support.thorough import amount

StartEngine = Callable[..., AsyncLLM]

DEADLINE = 60.0
OPTIONS: dict[str, Any] = {
    "model": "random-tiny-moe",
    "dtype": "float32",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 128,
    "name": "victim",
    "data_parallel_size": 2,
}
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start(no_leftovers: None) -> Iterator[StartEngine]:
    engines: list[AsyncLLM] = []

    def start(**options: Any) -> AsyncLLM:
        engines.append(AsyncLLM(**OPTIONS | options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


async def run_until_the_end(engine: AsyncLLM, rank: int, started: asyncio.Event) -> None:
    while True:
        async for _ in engine.generate("hello", ENDLESS, data_parallel_rank=rank):
            started.set()


def core_processes(engine: AsyncLLM) -> list[psutil.Process]:
    """The engine cores' processes, by rank."""
    cores = [p for p in processes_of(engine.connection) if " core " in f" {' '.join(p.cmdline())} "]
    return sorted(cores, key=lambda process: process.cmdline()[-1])


def check_end(engine: AsyncLLM, error: object, cause: str, killed_at: float) -> None:
    assert time.monotonic() - killed_at < DEADLINE
    assert isinstance(error, EngineDeadError), error
    assert cause in error.cause
    assert "SIGKILL" in error.cause
    info = engine.connection
    wait_for(lambda: not session_processes(info), "the end of the engine's processes")
    wait_for(lambda: not Path(info.run_dir).exists(), "the end of the run directory")
    wait_for(lambda: not connection_file(info.name).exists(), "the end of the connection file")


async def test_an_engine_core_that_is_killed_is_named_as_the_cause(start: StartEngine) -> None:
    engine = start()
    started = [asyncio.Event() for _ in range(4)]
    # With requests for the other engine core alone, whose worker waits for the one that is killed.
    streams = [asyncio.create_task(run_until_the_end(engine, 0, event)) for event in started]
    await asyncio.gather(*(event.wait() for event in started))
    killed_at = time.monotonic()
    core_processes(engine)[1].kill()
    for error in await asyncio.gather(*streams, return_exceptions=True):
        check_end(engine, error, "engine core 1 (", killed_at)


async def test_a_host_that_looks_late_names_the_first_cause(
    start: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It finds that one core was killed, and what another one says, which has lost it."""
    monkeypatch.setattr("nbengine.client.link.engine_verdict.LAST_WORDS_TIMEOUT", 60.0)
    engine = start()
    started = asyncio.Event()
    stream = asyncio.create_task(run_until_the_end(engine, 0, started))
    await started.wait()
    left, victim = core_processes(engine)
    host = engine.connection.host_pid
    stop(host)
    victim.kill()
    wait_for(lambda: not is_running(left), "the end of the core that was left")
    continued_at = time.monotonic()
    os.kill(host, signal.SIGCONT)
    (error,) = await asyncio.gather(stream, return_exceptions=True)
    check_end(engine, error, "engine core 1 (", continued_at)


@pytest.mark.parametrize("executor", amount([LOCK_STEP_EXECUTOR], thorough=[LOCK_STEP_EXECUTOR, None]))
async def test_an_idle_engine_core_that_is_killed_is_named_as_the_cause(
    start: StartEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str | None
) -> None:
    """While nobody computes, no model takes part in it."""
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH, prepend=os.pathsep)
    knobs = {"meeting": str(tmp_path / "meeting"), "max_position_embeddings": 1024, "vocab_size": 260}
    engine = start(distributed_executor_backend=executor, hf_overrides={} if executor is None else knobs)
    killed_at = time.monotonic()
    core_processes(engine)[1].kill()
    wait_for(lambda: engine.engine_core.standing.is_dead, "the news of the end", DEADLINE)
    with pytest.raises(EngineDeadError) as caught:
        async for _ in engine.generate("hello", GREEDY):
            pass
    check_end(engine, caught.value, "engine core 1 (", killed_at)


async def test_a_worker_that_is_killed_is_named_as_the_cause(start: StartEngine) -> None:
    engine = start(tensor_parallel_size=2, enable_expert_parallel=True)
    started = [asyncio.Event() for _ in range(4)]
    streams = [
        asyncio.create_task(run_until_the_end(engine, n % 2, event)) for n, event in enumerate(started)
    ]
    await asyncio.gather(*(event.wait() for event in started))
    killed_at = time.monotonic()
    victim = core_processes(engine)[1].children()[1]
    victim.kill()
    for error in await asyncio.gather(*streams, return_exceptions=True):
        check_end(engine, error, f"worker 1 (TP1), pid {victim.pid}", killed_at)


@pytest.mark.parametrize("rank", [0, 1])
async def test_an_engine_core_that_is_killed_while_another_waits_for_it_to_start_is_named(
    start: StartEngine, private_socket_dir: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH, prepend=os.pathsep)
    killed: list[float] = []

    def victims() -> list[psutil.Process]:
        (host,) = [child for child in psutil.Process().children() if "host" in " ".join(child.cmdline())]
        return [core for core in host.children() if f"core {rank} " in " ".join(core.cmdline())]

    def kill(progress: Progress) -> None:
        if progress.rank == rank or killed or "waiting" not in progress.detail:
            return
        wait_for(victims, "the core that is to be killed")
        killed.append(time.monotonic())
        victims()[0].kill()

    with pytest.raises(EngineStartError) as caught:
        start(progress=kill, distributed_executor_backend=ABSENT_CORE, hf_overrides={"absent": rank})
    assert time.monotonic() - killed[0] < DEADLINE
    assert f"engine core {rank} (" in caught.value.cause
    assert "SIGKILL" in caught.value.cause
    wait_for(lambda: not list(private_socket_dir.iterdir()), "the end of the run directory")
