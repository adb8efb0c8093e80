"""kill -9 of a real worker at any moment: the clients learn it soon, with its rank, and nothing of the engine is left."""

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
from process_support.absent import ABSENT_WORKER
from process_support.engine_under_test import SUPPORT_PATH, wait_for
from process_support.tiny_models import QUANTISED

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
    "model": "random-tiny",
    "dtype": "float32",
    "max_model_len": 1024,
    "num_gpu_blocks_override": 128,
    "name": "victim",
}
ENDLESS = SamplingParams(max_tokens=900, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def start(no_leftovers: None) -> Iterator[StartEngine]:
    engines: list[AsyncLLM] = []

    def start(**options: Any) -> AsyncLLM:
        engines.append(AsyncLLM(**{**OPTIONS, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.shutdown()


async def greedy_tokens(engine: AsyncLLM) -> list[int]:
    async for output in engine.generate("hello", GREEDY):
        tokens = output.outputs[0].token_ids
    return tokens


async def run_until_the_end(engine: AsyncLLM, started: asyncio.Event) -> None:
    while True:
        async for _ in engine.generate("hello", ENDLESS):
            started.set()


def check_death(engine: AsyncLLM, error: object, rank: int, killed_at: float) -> None:
    assert time.monotonic() - killed_at < DEADLINE
    assert isinstance(error, EngineDeadError), error
    assert f"worker {rank} (" in error.cause
    assert "SIGKILL" in error.cause
    info = engine.connection
    wait_for(lambda: not session_processes(info), "the end of the engine's processes")
    wait_for(lambda: not Path(info.run_dir).exists(), "the end of the run directory")
    wait_for(lambda: not connection_file(info.name).exists(), "the end of the connection file")


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"tensor_parallel_size": 2, "quantization": QUANTISED, "dtype": "bfloat16", "max_model_len": 512},
    ],
    ids=["tp2", "pp2", "tp2-prepared"],
)
async def test_a_worker_killed_in_mid_generation_ends_the_engine_which_can_be_started_again(
    start: StartEngine, sizes: dict[str, Any], model_of_blocks: Path
) -> None:
    if "quantization" in sizes:
        sizes = {**sizes, "model": str(model_of_blocks)}
    engine = start(**sizes)
    tokens = await greedy_tokens(engine)
    started = [asyncio.Event() for _ in range(4)]
    streams = [asyncio.create_task(run_until_the_end(engine, event)) for event in started]
    await asyncio.gather(*(event.wait() for event in started))
    killed_at = time.monotonic()
    os.kill(engine.ready.workers[1].pid, signal.SIGKILL)
    for error in await asyncio.gather(*streams, return_exceptions=True):
        check_death(engine, error, 1, killed_at)
    # Of two workers without prepared steps, the test of a death at the start has the other half.
    if amount("quantization" in sizes, thorough=True):
        again = start(**sizes)
        assert await greedy_tokens(again) == tokens
        await check_death_of_an_idle_worker(again)


async def check_death_of_an_idle_worker(engine: AsyncLLM) -> None:
    killed_at = time.monotonic()
    os.kill(engine.ready.workers[0].pid, signal.SIGKILL)
    wait_for(lambda: engine.engine_core.standing.is_dead, "the news of the end", DEADLINE)
    with pytest.raises(EngineDeadError) as caught:
        await greedy_tokens(engine)
    check_death(engine, caught.value, 0, killed_at)


def worker_processes(host: psutil.Process) -> list[psutil.Process]:
    """The workers that there are, as they were started."""
    cores = host.children()
    return [worker for core in cores for worker in core.children() if "worker" in " ".join(worker.cmdline())]


async def test_a_worker_killed_at_the_start_is_named_and_one_killed_idle_in_the_engine_after_it_too(
    start: StartEngine, private_socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", SUPPORT_PATH, prepend=os.pathsep)
    killed: list[float] = []

    def kill(progress: Progress) -> None:
        # The workers are there when they have more to say.
        if progress.worker is None or progress.detail == "starting" or killed:
            return
        (host,) = [child for child in psutil.Process().children() if "host" in " ".join(child.cmdline())]
        victim = worker_processes(host)[-1]
        killed.append(time.monotonic())
        victim.kill()

    with pytest.raises(EngineStartError) as caught:
        start(tensor_parallel_size=2, progress=kill, distributed_executor_backend=ABSENT_WORKER)
    assert time.monotonic() - killed[0] < DEADLINE
    assert "worker 1 (TP1)" in caught.value.cause
    assert "SIGKILL" in caught.value.cause
    # The other worker still imports what it needs, which takes long where much else runs.
    wait_for(lambda: not list(private_socket_dir.iterdir()), "the end of the run directory", DEADLINE)
    again = start(tensor_parallel_size=2)
    assert len(await greedy_tokens(again)) == 8
    await check_death_of_an_idle_worker(again)
