"""SIGSTOP of any process of any layout: a word within the deadline, and after SIGCONT all goes on as if nothing had been.

`HYPOTHESIS_PROFILE=thorough` stops each process of each layout for a minute, under the usual deadlines.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_processes import processes_of
from process_support.engine_under_test import wait_for
from process_support.kill_matrix import LAYOUTS, NAME, Layout, wait_a_moment
from stopping import stop

from nbengine import AsyncLLM, SamplingParams
from nbengine.client.engines.directory import list_engines
from nbengine.client.engines.processes import session_processes
from nbengine.config.progress import DEFAULT_STEP_TIMEOUT_SECONDS, ProgressDeadlines
from nbengine.ipc.control_messages import EngineReady, WorkerInfo
from nbengine.runtime.connection import newest
from nbengine.sampling_params import RequestOutputKind
from tests.support.thorough import amount

STOPPED_SECONDS = amount(0.0, thorough=60.0)
"""The least time for which a process is stopped; it is always stopped until there is a word of it."""
STEP_TIMEOUT = amount(12.0, thorough=DEFAULT_STEP_TIMEOUT_SECONDS)
SLACK = 60.0
"""Seconds that a word may be late, and that a recovery may take, on a machine that does much else."""
NUM_TOKENS = 200
STREAM = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)
LEASE = 1.0


@dataclass(frozen=True)
class Stop:
    """SIGSTOP of a process. `place` is its number among those of its role."""

    layout: str
    role: str
    place: int = 0

    def victim(self, host: int, cores: Sequence[EngineReady]) -> int:
        """Find the process's pid. The workers of several cores start in any order: each core says which are its own."""
        if self.role == "host":
            return host
        by_rank = sorted(cores, key=lambda core: core.rank)
        if self.role == "core":
            return by_rank[self.place].pid
        return [worker.pid for core in by_rank for worker in core.workers][self.place]

    @property
    def named(self) -> str:
        """The beginning of the word that there has to be of it."""
        if self.role == "host":
            return "host: no answer for "
        num_workers = LAYOUTS[self.layout].num_workers
        rank = self.place // num_workers if self.role == "worker" else self.place
        return f"core {rank}: no progress for "

    def __str__(self) -> str:
        return f"{self.layout}-{self.role} {self.place}"


def all_stops() -> Iterator[Stop]:
    """Every process of every layout."""
    for name, layout in LAYOUTS.items():
        yield Stop(name, "host")
        yield from (Stop(name, "core", place) for place in range(layout.num_cores))
        yield from (Stop(name, "worker", place) for place in range(layout.num_cores * layout.num_workers))


FEW = [
    Stop("pp2", "host"),
    Stop("pp2", "worker", 0),
    Stop("dp2", "core", 1),
    Stop("dp2 in lock step", "core", 0),
]
STOPS = amount(FEW, thorough=list(all_stops()))

pytestmark = pytest.mark.timeout(amount(300, thorough=1800))


@contextmanager
def stopped_process(pid: int) -> Iterator[None]:
    """Hold a process still until the block ends, however it ends."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def started(layout: Layout) -> AsyncLLM:
    options = {"max_model_len": 1024, "num_gpu_blocks_override": 256, "dtype": "float32"}
    return AsyncLLM(**options | dict(layout.options), name=NAME, step_timeout=STEP_TIMEOUT)


async def read(engine: AsyncLLM, begun: asyncio.Event) -> int:
    num_tokens = 0
    async for output in engine.generate({"prompt_token_ids": [7]}, STREAM):
        num_tokens += len(output.outputs[0].token_ids)
        begun.set()
    return num_tokens


def test_a_worker_is_found_by_its_core_in_whatever_order_the_workers_have_started() -> None:
    def core(rank: int, pid: int, *workers: int) -> EngineReady:
        places = [WorkerInfo(place, place, 0, each, "cpu", 0, 0, 0, 1) for place, each in enumerate(workers)]
        return EngineReady(rank, 1, 16, 64, 0, 0, "cpu", "float32", [], pid, places)

    cores = [core(1, 12, 20, 23), core(0, 11, 21, 22)]
    layout = "dp2 x tp2 in lock step"
    assert [Stop(layout, "worker", place).victim(10, cores) for place in range(4)] == [21, 22, 20, 23]
    assert [Stop(layout, "core", place).victim(10, cores) for place in range(2)] == [11, 12]
    assert Stop(layout, "host").victim(10, cores) == 10


def test_the_thorough_stops_leave_out_no_process_of_any_layout() -> None:
    stops = list(all_stops())
    assert {stopped.layout for stopped in stops} == set(LAYOUTS)
    for name, layout in LAYOUTS.items():
        num_processes = 1 + layout.num_cores * (1 + layout.num_workers)
        assert len({stopped for stopped in stops if stopped.layout == name}) == num_processes


@pytest.mark.parametrize("layout", sorted({stopped.layout for stopped in STOPS}))
async def test_a_stopped_process_is_named_in_time_and_nothing_is_lost_when_it_goes_on(layout: str) -> None:
    """One engine meets one stop after the other: what the next one finds is what a recovery has left."""
    engine = started(LAYOUTS[layout])
    try:
        for stopped in STOPS:
            if stopped.layout == layout:
                await stop_and_go_on(engine, stopped)
    finally:
        engine.shutdown()
    assert not session_processes(engine.connection)


async def stop_and_go_on(engine: AsyncLLM, stopped: Stop) -> None:
    """Hold a process still while it works, and let it go on."""
    info = newest(engine.connection)
    pid = stopped.victim(info.host_pid, info.ready)
    assert pid in {process.pid for process in processes_of(info)}
    begun = [asyncio.Event() for _ in range(4)]
    streams = [asyncio.create_task(read(engine, event)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    deadline = ProgressDeadlines.of_step_timeout(STEP_TIMEOUT).to_report("step")
    with stopped_process(pid):
        since = time.monotonic()
        wait_for(lambda: engine.stall, f"a word of {stopped}", deadline + SLACK)
        assert stopped.named in engine.stall
        assert "SIGSTOP?" in engine.stall
        (listing,) = list_engines()
        assert listing.state == "stopped"
        assert engine.death is None
        wait_a_moment(max(0.0, since + STOPPED_SECONDS - time.monotonic()))
    answers = await asyncio.wait_for(asyncio.gather(*streams), 2 * SLACK)
    assert answers == [NUM_TOKENS] * len(streams), stopped
    wait_for(lambda: engine.stall is None, f"the recovery from {stopped}", SLACK)
    await engine.check_health()


CLIENT = """
import asyncio, sys
from nbengine import AsyncLLM, SamplingParams
from nbengine.errors import LeaseExpiredError

async def main():
    llm = AsyncLLM.attach(sys.argv[1])
    endless = SamplingParams(max_tokens=900, ignore_eos=True)
    stream = llm.generate({"prompt_token_ids": [7]}, endless)
    await anext(stream)
    print("begun", flush=True)
    try:
        async for _ in stream:
            pass
        # All of it was there before the process was stopped, or has waited for it.
        said = "whole"
    except LeaseExpiredError as error:
        said = str(error)
    while True:
        try:
            outputs = [o async for o in llm.generate({"prompt_token_ids": [7]}, SamplingParams(max_tokens=3, ignore_eos=True))]
            break
        except LeaseExpiredError:
            await asyncio.sleep(0.01)
    print(len(outputs[-1].outputs[0].token_ids), said, flush=True)
    llm.detach()

asyncio.run(main())
"""


def test_a_client_that_is_stopped_for_longer_than_its_lease_goes_on_under_another() -> None:
    engine = AsyncLLM(
        "random-tiny", max_model_len=1024, num_gpu_blocks_override=256, name=NAME, bound=False, lease=LEASE
    )
    try:
        command = [sys.executable, "-c", CLIENT, NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "begun\n"
            log = Path(engine.connection.log_path)
            with stopped_process(client.pid):
                since = time.monotonic()
                wait_for(
                    lambda: "client 2 detached" in log.read_text(), "the end of the lease", LEASE + SLACK
                )
                assert not engine.stats_blocking().engines_running
                wait_a_moment(max(0.0, since + STOPPED_SECONDS - time.monotonic()))
            out, _ = client.communicate(timeout=2 * SLACK)
        count, _, reason = out.strip().partition(" ")
        assert count == "3"
        assert reason == "whole" or "is stopped" in reason
    finally:
        engine.shutdown()
