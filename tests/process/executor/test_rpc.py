"""Calls to worker processes: answers, their order, time limits, failures, large arguments."""

from __future__ import annotations

import logging
import os
import re
import signal
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from process_support.fake_worker import FakeWorkersExecutor, StartExecutor, UnpicklableError
from stopping import stop

from nbengine.errors import EngineDeadError, EngineStartError, InvalidArgumentError, NBEngineError, WireError
from nbengine.executor import multiproc
from nbengine.runtime.executor_files import ExecutorFiles
from nbengine.runtime.logs import worker_log_path


@contextmanager
def held(executor: FakeWorkersExecutor, *ranks: int) -> Iterator[None]:
    """Hold workers still, all of them unless told which."""
    pids = [executor._workers[rank].process.pid for rank in ranks or range(len(executor._workers))]
    stop(*pids)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def test_every_rank_answers_and_a_unique_one_alone(executor: FakeWorkersExecutor) -> None:
    assert executor.collective_rpc("rank") == [0, 1]
    assert executor.collective_rpc("rank", unique_reply_rank=1) == 1
    assert len(set(executor.collective_rpc("pid"))) == 2
    with pytest.raises(InvalidArgumentError, match="unique_reply_rank must be None or from 0 to 1, got 2"):
        executor.collective_rpc("rank", unique_reply_rank=2)
    args, kwargs = executor.collective_rpc("echo", (1, "x"), {"key": {2}})[1]
    assert (args, kwargs) == ((1, "x"), {"key": {2}})


def test_calls_that_are_not_waited_for_are_carried_out_in_order(executor: FakeWorkersExecutor) -> None:
    with held(executor):
        futures = [executor.collective_rpc("late", (i, 0.01), non_block=True) for i in range(5)]
        assert not futures[-1].done()
    assert executor.collective_rpc("echo", (5,)) == [((5,), {})] * 2
    assert all(future.done() for future in futures)
    assert [future.result() for future in futures] == [[i, i] for i in range(5)]


def test_more_calls_than_the_queues_hold_can_be_left_unanswered(executor: FakeWorkersExecutor) -> None:
    futures = [executor.collective_rpc("echo", (i,), non_block=True) for i in range(200)]
    assert [future.result()[1][0][0] for future in futures] == list(range(200))


def test_a_time_limit_leaves_the_order_of_the_answers_intact(executor: FakeWorkersExecutor) -> None:
    with held(executor, 1), pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        executor.collective_rpc("late", ("slow", 0.0), timeout=0.05)
    assert executor.collective_rpc("rank", timeout=60) == [0, 1]


@pytest.mark.parametrize("num_bytes", [1 << 16, 5 << 20])
def test_large_arguments_and_answers_arrive_whole(executor: FakeWorkersExecutor, num_bytes: int) -> None:
    sent = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    for args, _ in executor.collective_rpc("echo", (sent, "beside")):
        np.testing.assert_array_equal(args[0], sent)
        assert args[1] == "beside"


def test_a_failure_reaches_the_caller_as_it_was_with_the_workers_traceback_in_the_log(
    executor: FakeWorkersExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError, match="out of order"):
        executor.collective_rpc("trouble", ("", "runtime"))
    assert "worker 1 failed in trouble" in caplog.text
    assert "fake_worker.py" in caplog.text
    assert "ValueError: the root of it" in caplog.text
    with pytest.raises(EngineStartError, match="12 GiB of weights do not fit"):
        executor.collective_rpc("trouble", ("memory", "memory"))
    assert executor.collective_rpc("rank") == [0, 1]


def test_what_cannot_be_pickled_is_a_failure_of_its_call_alone(executor: FakeWorkersExecutor) -> None:
    with pytest.raises(WireError):
        executor.collective_rpc("echo", (lambda: None,))
    with pytest.raises(NBEngineError, match="pickle"):
        executor.collective_rpc("function")
    with pytest.raises(NBEngineError, match=f"{UnpicklableError.__name__}: this and that"):
        executor.collective_rpc("trouble", ("unpicklable", ""))
    assert executor.collective_rpc("rank") == [0, 1]


@pytest.mark.parametrize("method", ["no_such_method", "_private", "knobs"])
def test_only_public_methods_can_be_called(executor: FakeWorkersExecutor, method: str) -> None:
    with pytest.raises(NBEngineError, match=f"workers have no method '{method}'"):
        executor.collective_rpc(method)
    assert executor.collective_rpc("rank") == [0, 1]


def test_outputs_that_are_under_way_do_not_hold_up_the_next_call(start_executor: StartExecutor) -> None:
    executor = start_executor(1, is_async=True)
    late = executor.collective_rpc("held_output", ("first",), non_block=True, unique_reply_rank=0)
    second = executor.collective_rpc("late_output", ("second", 0.2), non_block=True, unique_reply_rank=0)
    first, next_one = late.result(60), second.result(60)
    assert (first.value, next_one.value) == ("first", "second")
    assert next_one.called_at < first.came_at
    assert next_one.on_thread == "nbengine-worker-output"
    assert (executor.async_scheduling, executor.max_concurrent_batches) == (True, 2)


def test_without_async_scheduling_outputs_that_are_under_way_are_waited_for(
    start_executor: StartExecutor,
) -> None:
    executor = start_executor(1)
    value = executor.collective_rpc("late_output", ("late", 0.05))[0]
    assert (value.value, value.on_thread) == ("late", "MainThread")
    assert (executor.async_scheduling, executor.max_concurrent_batches) == (False, 1)


def test_there_are_as_many_steps_in_flight_as_stages(start_executor: StartExecutor) -> None:
    executor = start_executor(1, 2)
    assert executor.max_concurrent_batches == 2
    assert executor.collective_rpc("rank") == [0, 1]


def test_a_failure_in_a_call_that_others_wait_for_is_raised_though_they_do_not_answer(
    start_executor: StartExecutor,
) -> None:
    executor = start_executor(2)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"worker 1 \(TP1\), pid \d+, failed in trouble: RuntimeError"):
        executor.collective_rpc("trouble", ("native", "runtime"))
    assert time.monotonic() - start < 60


def test_each_process_says_what_it_is_and_has_a_log_of_its_own(
    start_executor: StartExecutor, files: ExecutorFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = []
    executor = start_executor(2, 2, progress=heard.append)
    pids = executor.collective_rpc("pid")
    titles = [psutil.Process(pid).cmdline()[0] for pid in pids]
    places = ["TP0 PP0", "TP1 PP0", "TP0 PP1", "TP1 PP1"]
    assert titles == [f"nbengine: worker {place} tested" for place in places]
    assert {message.worker for message in heard} == {0, 1, 2, 3}
    # A worker that gets no processor for a second would be ended by a signal.
    monkeypatch.setattr(multiproc, "SHUTDOWN_GRACE", 60.0)
    executor.shutdown()
    for rank in range(4):
        log = worker_log_path(files.log, rank)
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert re.search(rf"\[worker {rank}\] .*shut down in order", log.read_text())


def test_nothing_is_left_after_an_orderly_end(start_executor: StartExecutor, files: ExecutorFiles) -> None:
    executor = start_executor(2)
    assert list(Path(files.sockets).iterdir()) == list(Path(files.shared_memory).iterdir()) == []
    pids = executor.collective_rpc("pid")
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    assert not any(map(psutil.pid_exists, pids))
    for use in (executor.check_health, lambda: executor.collective_rpc("rank")):
        with pytest.raises(EngineDeadError, match="shut down"):
            use()


def test_what_was_not_waited_for_ends_with_the_executor(
    start_executor: StartExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    executor = start_executor(1)
    future = executor.collective_rpc("late", ("x", 0.2), non_block=True)
    executor.shutdown()
    assert isinstance(future.exception(), EngineDeadError)
    assert not caplog.records
