"""Workers that end, hang or are stopped, at any moment: what the caller is told, and that nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from queue import Queue

import psutil
import pytest
from process_support.engine_under_test import wait_for
from process_support.fake_worker import FakeWorkersExecutor, StartExecutor

from nbengine.errors import EngineDeadError, EngineStartError, InvalidArgumentError, ModelLoadError
from nbengine.executor import failures, multiproc
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.logs import worker_log_path
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput

pytestmark = pytest.mark.fresh_processes

NOTICED = 60.0
"""Seconds within which the end of a worker must be known."""


def plan(token: int, name: str = "a") -> SchedulerOutput:
    new = NewRequestData(name, [token], SamplingParams(temperature=0), [0], 0)
    return SchedulerOutput([new], CachedRequestData(), {name: 1}, 1, set())


def step_and_ask(executor: FakeWorkersExecutor) -> None:
    executor.execute_model(plan(7))
    executor.sample_tokens()
    # The failure of a worker that has no answer to give may not be known yet.
    executor.collective_rpc("late", ("x", 1.0))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let executors wait long for a worker's own end: a process may get no processor for a second."""
    monkeypatch.setattr(failures, "SETTLE_SECONDS", NOTICED)
    monkeypatch.setattr(multiproc, "VERDICT_SECONDS", NOTICED)


def kill(executor: FakeWorkersExecutor, rank: int) -> int:
    pid: int = executor._workers[rank].process.pid
    os.kill(pid, signal.SIGKILL)
    return pid


def expect_gone(executor: FakeWorkersExecutor, files: ExecutorFiles) -> None:
    pids = [worker.process.pid for worker in executor._workers]
    start = time.monotonic()
    executor.shutdown()
    assert time.monotonic() - start < NOTICED
    assert not any(map(psutil.pid_exists, pids))
    assert not [*Path(files.sockets).iterdir(), *Path(files.shared_memory).iterdir()]


def test_a_worker_killed_while_idle_is_noticed_at_once(
    start_executor: StartExecutor, files: ExecutorFiles
) -> None:
    executor, rank = start_executor(2), 1
    told: Queue[EngineDeadError] = Queue()
    executor.register_failure_callback(told.put)
    pid = kill(executor, rank)
    error = told.get(timeout=NOTICED)
    expected = f"worker {rank} (TP{rank}), pid {pid}, was killed by signal 9 (SIGKILL)"
    assert error.cause.startswith(expected)
    with pytest.raises(EngineDeadError) as raised:
        executor.collective_rpc("rank")
    assert raised.value.cause == error.cause
    with pytest.raises(EngineDeadError):
        executor.check_health()
    later: Queue[EngineDeadError] = Queue()
    executor.register_failure_callback(later.put)
    assert later.get_nowait() is error
    expect_gone(executor, files)


@pytest.mark.parametrize(("rank", "unique"), [(0, None), (1, 0)])
def test_a_worker_killed_in_a_call_ends_the_wait_for_it(
    start_executor: StartExecutor, files: ExecutorFiles, rank: int, unique: int | None
) -> None:
    executor = start_executor(2)
    kinds = ["native", "native"]
    kinds[rank] = "kill"
    earlier = executor.collective_rpc("late", ("x", 0.1), non_block=True)
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as raised:
        executor.collective_rpc("trouble", kinds, unique_reply_rank=unique)
    assert time.monotonic() - start < NOTICED
    assert raised.value.cause.startswith(f"worker {rank} (TP{rank}), pid ")
    assert "kill begins" in raised.value.log_tail
    assert earlier.done()
    expect_gone(executor, files)


def test_a_worker_killed_while_the_queue_of_calls_is_full_ends_the_wait_for_room(
    start_executor: StartExecutor, files: ExecutorFiles
) -> None:
    executor = start_executor(2)
    executor.collective_rpc("trouble", ("stop", ""), non_block=True)
    stopped = executor._workers[0].process.pid
    wait_for(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED, "a stopped worker")

    def fill() -> None:
        for number in range(1000):
            executor.collective_rpc("echo", (number,), non_block=True)

    executor.register_failure_callback(lambda _: None)
    killer = psutil.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {stopped}"])
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker 0 \(TP0\), pid \d+, was killed by signal 9"):
        fill()
    assert time.monotonic() - start < NOTICED
    killer.wait()
    expect_gone(executor, files)


def test_a_step_is_answered_once_with_the_tokens(start_executor: StartExecutor) -> None:
    executor = start_executor(2)
    assert executor.execute_model(plan(7)) is None
    assert executor.sample_tokens().sampled_token_ids == [[8]]
    executed = executor.execute_model(plan(20, "b"), non_block=True)
    assert executed.result() is None
    assert executor.sample_tokens(non_block=True).result().sampled_token_ids == [[21]]
    nothing = SchedulerOutput([], CachedRequestData(), {}, 0, {"a", "b"})
    assert executor.execute_model(nothing).req_ids == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_in_any_worker_is_told_with_the_cause(
    start_executor: StartExecutor, files: ExecutorFiles, caplog: pytest.LogCaptureFixture, rank: int
) -> None:
    executor = start_executor(2, ranks={str(rank): {"at_token": 8, "step_by": "runtime"}})
    start = time.monotonic()
    with pytest.raises(EngineDeadError) as raised:
        step_and_ask(executor)
    assert time.monotonic() - start < NOTICED
    expected = "failed in execute_model: RuntimeError: out of order; caused by ValueError: the root of it"
    assert raised.value.cause.startswith(f"worker {rank} (TP{rank}), pid ")
    assert raised.value.cause.endswith(expected)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert "fake_worker.py" in raised.value.log_tail
    assert "ValueError: the root of it" in caplog.text
    expect_gone(executor, files)


def test_a_lost_connection_is_not_taken_for_the_cause_when_a_worker_was_killed(
    start_executor: StartExecutor, patient: None
) -> None:
    executor = start_executor(2, ranks={"0": {"at_token": 8, "step_by": "lost"}})
    executor.collective_rpc("late", ("x", 0.3, (1,)), non_block=True)
    executor.execute_model(plan(7), non_block=True)
    wait_for(lambda: "Connection closed by peer" in executor_log(executor, 0), "the report of worker 0")
    kill(executor, 1)
    with pytest.raises(EngineDeadError, match=r"worker 1 \(TP1\), pid \d+, was killed by signal 9"):
        executor.collective_rpc("rank")


def executor_log(executor: FakeWorkersExecutor, rank: int) -> str:
    return worker_log_path(executor._files.log, rank).read_text()


@pytest.mark.parametrize("kind", ["native_with_lock", "stop"])
def test_a_worker_that_is_stuck_does_not_keep_the_executor_from_ending(
    start_executor: StartExecutor, files: ExecutorFiles, kind: str
) -> None:
    executor = start_executor(2)
    executor.collective_rpc("trouble", (kind, ""), non_block=True)
    wait_for(lambda: f"{kind} begins" in executor_log(executor, 0), "the trouble")
    expect_gone(executor, files)


@pytest.mark.parametrize(
    ("kind", "rank", "error", "message"),
    [
        (
            "kill",
            0,
            EngineStartError,
            r"^at the start, {worker}, pid \d+, was killed by signal 9 \(SIGKILL\)",
        ),
        ("exit", 0, EngineStartError, r"^at the start, {worker}, pid \d+, exited with status 3$"),
        ("runtime", 1, EngineStartError, r"^{worker}, pid \d+, failed in start: RuntimeError: out of order"),
        ("memory", 1, EngineStartError, r"^{worker}: 12 GiB of weights do not fit$"),
        ("load", 0, ModelLoadError, r"^model.safetensors is truncated$"),
        ("argument", 1, InvalidArgumentError, r"^tensor_parallel_size must be 1, 3 or 9, got 2$"),
    ],
)
def test_a_start_that_fails_in_one_worker_ends_all_and_tells_the_cause(
    start_executor: StartExecutor,
    files: ExecutorFiles,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    rank: int,
    error: type[Exception],
    message: str,
) -> None:
    ranks = {str(rank): {"start_by": kind}, str(1 - rank): {"start_by": "native"}}
    start = time.monotonic()
    with pytest.raises(error) as raised:
        start_executor(2, ranks=ranks)
    assert time.monotonic() - start < NOTICED
    cause = getattr(raised.value, "cause", None) or str(raised.value)
    assert re.search(message.format(worker=rf"worker {rank} \(TP{rank}\)"), cause), cause
    assert not psutil.Process().children()
    assert not [*Path(files.sockets).iterdir(), *Path(files.shared_memory).iterdir()]
    assert f"worker {rank} (TP{rank}), pid" in caplog.text


def test_at_the_start_too_a_lost_connection_gives_way_to_a_death(
    start_executor: StartExecutor, patient: None
) -> None:
    ranks = {"0": {"start_by": "lost"}, "1": {"start_by": "kill", "start_delay": 0.3}}
    with pytest.raises(EngineStartError, match=r"worker 1 \(TP1\), pid \d+, was killed by signal 9"):
        start_executor(2, ranks=ranks)


def test_at_the_start_a_lost_connection_is_the_cause_if_there_is_no_other(
    start_executor: StartExecutor,
) -> None:
    ranks = {"0": {"start_by": "lost"}, "1": {"start_by": "native"}}
    with pytest.raises(
        EngineStartError, match=r"worker 0 \(TP0\), pid \d+, failed in start: .*Connection closed"
    ):
        start_executor(2, ranks=ranks)


def test_after_a_death_a_new_executor_starts_in_the_same_directories(start_executor: StartExecutor) -> None:
    executor = start_executor(2)
    kill(executor, 1)
    with pytest.raises(EngineDeadError):
        executor.collective_rpc("late", ("x", 10.0))
    executor.shutdown()
    assert start_executor(2).collective_rpc("rank") == [0, 1]
