"""A whole engine with workers in processes: what its clients see of them, and of their end."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from engine_processes import is_running
from process_support.engine_under_test import EngineUnderTest, wait_for
from process_support.fake_worker import FAKE_WORKERS_EXECUTOR
from process_support.raw_client import RawClient
from stopping import stop

from nbengine.client.engines.directory import reap
from nbengine.config import ParallelConfig, SchedulerConfig
from nbengine.ipc.control_messages import Attached, EngineDead, Progress
from nbengine.runtime.logs import worker_log_path

NOTICED = 60.0
"""Seconds within which a client must know of the end of a worker."""


@pytest.fixture
def start_workers(start_engine):
    """Start an engine with fake workers."""

    def start(knobs: dict | None = None, name: str | None = None, *, tp: int = 2, pp: int = 1, **engine):
        parallel = ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            distributed_executor_backend=FAKE_WORKERS_EXECUTOR,
        )
        engine.setdefault("scheduler", SchedulerConfig(async_scheduling=False))
        return start_engine(knobs, name, parallel=parallel, **engine)

    return start


def workers(engine: EngineUnderTest, count: int) -> list[psutil.Process]:
    """The worker processes by rank, once they say that they are."""

    def found() -> list[psutil.Process]:
        by_title = {title(process): process for process in engine.processes()}
        return [by_title[t] for t in sorted(by_title) if t.startswith("nbengine: worker ")]

    wait_for(lambda: len(found()) == count, "the workers")
    return found()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file, for `hold_start`: the loads begin when it is removed."""
    path = tmp_path / "hold"
    path.touch()
    return path


def hear_both_load(client: RawClient, hold: Path) -> None:
    """Attach before any load begins, since of earlier news a client gets only the last, and hear of both loads."""
    client.tell(client.attach_message())
    client.hear(Attached)
    hold.unlink()
    heard: set[int | None] = set()
    while heard != {0, 1}:
        heard.add(client.hear(Progress).worker)


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def expect_death(engine: EngineUnderTest, client, rank: int, pid: int, *, started: bool = True) -> EngineDead:
    """Check that the client is told of the end of this worker, in time, and that then nothing is left."""
    start = time.monotonic()
    dead = client.hear(EngineDead)
    assert time.monotonic() - start < NOTICED
    assert f"worker {rank} (TP{rank}), pid {pid}, was killed by signal 9 (SIGKILL)" in dead.cause
    assert (dead.started, dead.expected) == (started, False)
    assert f"worker {rank} (TP{rank}), pid {pid}," in dead.log_tail
    engine.wait_gone()
    return dead


@pytest.mark.parametrize("pp", [1, 2])
def test_requests_are_computed_by_workers_in_processes(start_workers, hold: Path, pp: int) -> None:
    engine = start_workers({"hold_start": str(hold)}, tp=1 if pp == 2 else 2, pp=pp)
    hear_both_load(engine.client(), hold)
    client = engine.client().attach()
    assert [worker.rank for worker in client.ready.workers] == [0, 1]
    assert [worker.pid for worker in client.ready.workers] == [p.pid for p in workers(engine, 2)]
    for i in range(4):
        client.add(f"r{i}", [i, 10 * i], max_tokens=5)
    client.wait_finished(*[f"r{i}" for i in range(4)])
    assert [client.tokens(f"r{i}") for i in range(4)] == [
        list(range(10 * i + 1, 10 * i + 6)) for i in range(4)
    ]
    for method, args in (("sleep", [1]), ("wake_up", []), ("start_profile", ["/tmp", 3])):
        assert client.call(method, *args) == (None, None)
    failure, report = client.call("stop_profile")
    assert failure is None
    assert report["paths"] == ["trace", "trace"]
    assert client.call("check_health") == (None, None)


def test_a_worker_killed_while_the_engine_is_idle_ends_it_with_an_error(start_workers) -> None:
    engine, rank = start_workers(), 1
    client = engine.client().attach()
    pid = workers(engine, 2)[rank].pid
    os.kill(pid, signal.SIGKILL)
    expect_death(engine, client, rank, pid)


def test_a_worker_killed_in_a_step_ends_the_engine_with_an_error_and_a_new_one_starts(start_workers) -> None:
    engine, rank = start_workers({"step_seconds": 3600}), 0
    client = engine.client().attach()
    client.add("r", [1])
    log = worker_log_path(engine.log_path, rank)
    wait_for(lambda: "an endless step begins" in log.read_text(), "the step")
    pid = workers(engine, 2)[rank].pid
    os.kill(pid, signal.SIGKILL)
    dead = expect_death(engine, client, rank, pid)
    assert "an endless step begins" in dead.log_tail
    client.close()
    again = start_workers(name=engine.name)
    client = again.client().attach()
    client.add("r", [1], max_tokens=1)
    client.read_until(lambda: "r" in client.outputs)
    again.close()


def test_a_worker_killed_while_it_loads_ends_the_start_with_an_error(start_workers, hold: Path) -> None:
    engine, rank = start_workers({"load_seconds": 3600, "hold_start": str(hold)}), 0
    client = engine.client()
    hear_both_load(client, hold)
    pid = workers(engine, 2)[rank].pid
    os.kill(pid, signal.SIGKILL)
    expect_death(engine, client, rank, pid, started=False)


def test_a_worker_killed_before_it_knows_anything_ends_the_start_with_an_error(start_workers) -> None:
    # However late it is killed, the engine has not started.
    engine = start_workers({"load_seconds": 3600})
    client = engine.client()
    client.tell(client.attach_message())
    core = engine.core()
    wait_for(lambda: len(core.children()) == 2, "two processes")
    pid = core.children()[1].pid
    os.kill(pid, signal.SIGKILL)
    expect_death(engine, client, 1, pid, started=False)


def test_out_of_memory_in_one_rank_ends_all_and_names_it(start_workers) -> None:
    engine = start_workers({"ranks": {"0": {"load_seconds": 3600}, "1": {"start_by": "memory"}}})
    client = engine.client()
    client.tell(client.attach_message())
    dead = client.hear(EngineDead)
    assert re.fullmatch(
        r"engine core 0 \(pid \d+\) did not start: worker 1 \(TP1\): 12 GiB of weights do not fit", dead.cause
    )
    engine.wait_gone()


def test_a_step_that_fails_in_a_worker_is_told_with_its_traceback(start_workers) -> None:
    engine = start_workers({"ranks": {"1": {"at_token": 3, "step_by": "runtime"}}})
    client = engine.client().attach()
    client.add("r", [1])
    dead = client.hear(EngineDead)
    assert re.search(
        r"worker 1 \(TP1\), pid \d+, failed in execute_model: RuntimeError: out of order", dead.cause
    )
    assert "fake_worker.py" in dead.log_tail
    assert client.tokens("r") == [] or client.tokens("r")[0] == 2
    engine.wait_gone()


@pytest.mark.parametrize("kind", ["native_with_lock", "stop"])
def test_a_core_that_is_killed_leaves_no_worker_however_stuck(start_workers, kind: str) -> None:
    engine = start_workers({"ranks": {"1": {"at_token": 2, "step_by": kind}}})
    client = engine.client().attach()
    client.add("r", [1])
    log = worker_log_path(engine.log_path, 1)
    wait_for(lambda: f"{kind} begins" in log.read_text(), "the trouble")
    core = engine.core()
    core.kill()
    start = time.monotonic()
    client.expect_end("was killed by signal 9", expected=False)
    engine.wait_gone()
    assert time.monotonic() - start < NOTICED


def test_workers_end_by_themselves_when_core_and_host_are_killed_at_once(start_workers) -> None:
    engine = start_workers({"ranks": {"1": {"at_token": 2, "step_by": "native"}}})
    client = engine.client().attach()
    client.add("r", [1])
    log = worker_log_path(engine.log_path, 1)
    wait_for(lambda: "native begins" in log.read_text(), "the trouble")
    running = workers(engine, 2)
    # The host last: the kernel wakes a stopped core whose host has gone.
    pids = (engine.core().pid, engine.host.pid)
    stop(*pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    start = time.monotonic()
    wait_for(lambda: not any(map(is_running, running)), "the end of the workers", NOTICED)
    assert time.monotonic() - start < NOTICED
    engine.host.wait()
    reap()


@pytest.mark.parametrize("kind", [None, "stop"])
def test_an_engine_that_is_asked_to_end_does_though_a_worker_is_stuck(
    start_workers, kind: str | None
) -> None:
    knobs = {"ranks": {"1": {"at_token": 2, "step_by": kind}}} if kind else {}
    engine = start_workers(knobs)
    client = engine.client().attach()
    log = worker_log_path(engine.log_path, 1)
    if kind is not None:
        client.add("r", [1])
        wait_for(lambda: f"{kind} begins" in log.read_text(), "the trouble")
    engine.host.terminate()
    client.expect_end("was ended by SIGTERM", expected=True)
    engine.wait_gone()
    assert ("shut down in order" in log.read_text()) == (kind is None)
