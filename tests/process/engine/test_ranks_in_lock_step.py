"""Engine cores in lock step in real processes: one that dies ends all, and their number changes under requests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from process_support.engine_under_test import wait_for
from process_support.lock_step_executor import ASYNC_LOCK_STEP_EXECUTOR, LOCK_STEP_EXECUTOR
from process_support.ranks_client import Traffic, core_pids, join, new_core

from nbengine.config import ModelConfig, ParallelConfig, SchedulerConfig
from nbengine.ipc.control_messages import EngineLost, RanksChanged, Scaled, ScaleElasticEP, Shutdown

KILLED = "was killed by signal 9"


@pytest.fixture
def start_lock_step(start_engine, tmp_path: Path):
    """Start an engine whose model's batches need those of all cores."""

    def start(num_ranks: int, knobs: dict | None = None, executor: str = LOCK_STEP_EXECUTOR):
        knobs = {"meeting": str(tmp_path / "meeting"), "step_seconds": 0.005} | (knobs or {})
        return start_engine(
            model=ModelConfig(model="fake", hf_overrides=knobs, is_moe=True),
            parallel=ParallelConfig(data_parallel_size=num_ranks, distributed_executor_backend=executor),
            scheduler=SchedulerConfig(max_num_seqs=3),
        )

    return start


def test_one_that_is_killed_ends_all_with_one_cause(start_lock_step) -> None:
    engine = start_lock_step(3)
    client = join(engine, 3)
    stream = client.ask("r", 1, 400, rank=0)
    client.run_until(lambda: stream.tokens, "its first token")
    pid = client.pid(1)
    os.kill(pid, signal.SIGKILL)
    dead = client.wait_dead()
    assert dead.cause.startswith(f"engine core 1 (pid {pid}) {KILLED}")
    assert client.heard(EngineLost) == client.heard(RanksChanged) == []
    engine.wait_gone()


@pytest.mark.parametrize("executor", [LOCK_STEP_EXECUTOR, ASYNC_LOCK_STEP_EXECUTOR])
def test_no_request_is_lost_or_doubled_while_cores_come_and_go(start_lock_step, executor) -> None:
    engine = start_lock_step(1, executor=executor)
    traffic = Traffic(join(engine, 1), join(engine, 1))
    for size in (3, 2, 1):
        assert traffic.scale(size) == Scaled(size)
        traffic.wait_for_ranks(size)
        assert len(core_pids(engine)) == size
        assert engine.read_connection().config.parallel.data_parallel_size == size
    traffic.finish()
    assert all(asked.is_complete for asked in traffic.asked)
    assert sum(asked.num_returned for asked in traffic.asked) > 0


def test_a_newcomer_that_is_killed_while_it_loads_changes_nothing(start_lock_step, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    engine = start_lock_step(1, {"hold_load": str(hold)})
    client = join(engine, 1)
    stream = client.ask("r", 1, 300)
    known = core_pids(engine)
    hold.touch()
    client.tell(ScaleElasticEP(2))
    os.kill(new_core(engine, known).pid, signal.SIGKILL)
    client.run_until(lambda: client.heard(Scaled), "the answer")
    hold.unlink()
    assert client.heard(Scaled)[0].data_parallel_size == 1
    assert KILLED in client.heard(Scaled)[0].error
    client.wait_done(stream)
    assert stream.is_complete
    assert client.scale(2) == Scaled(2)
    client.wait_ranks(0, 1)


@pytest.mark.parametrize("drain", [False, True])
def test_an_engine_can_be_shut_down_while_newcomers_load(start_lock_step, drain) -> None:
    engine = start_lock_step(1, {"load_seconds": 1.0})
    client = join(engine, 1)
    stream = client.ask("r", 1, 100)
    client.run_until(lambda: stream.tokens, "its first token")
    known = core_pids(engine)
    client.tell(ScaleElasticEP(3))
    wait_for(lambda: len(core_pids(engine) - known) == 2, "the newcomers", 60)
    client.tell(Shutdown(drain))
    assert client.wait_dead().expected
    assert stream.is_complete or not drain
    engine.wait_gone()


def test_idle_cores_change_their_number_too(start_lock_step) -> None:
    engine = start_lock_step(2)
    client = join(engine, 2)
    for size in (1, 2):
        assert client.scale(size) == Scaled(size)
        client.wait_ranks(*range(size))
    answers = [client.ask(f"r{rank}", rank, 20, rank) for rank in (0, 1)]
    client.wait_done(*answers)
    assert all(answer.is_complete for answer in answers)
