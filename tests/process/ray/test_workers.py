"""Workers on the nodes of a Ray cluster: they answer from there, and when one ends nobody waits in vain."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from process_support.fake_ray import FakeRayExecutor, fake_ray_config
from process_support.ray_cluster import START

from nbengine.errors import EngineDeadError, EngineStartError
from nbengine.runtime.executor_files import ExecutorFiles
from tests.support.thorough import amount

NOTICED = 60.0
"""Seconds within which the end of a worker must be known."""


@pytest.fixture
def start_executor(cluster, no_leftovers: None, tmp_path: Path) -> Iterator:
    executors: list[FakeRayExecutor] = []
    for name in ("s", "m"):
        (tmp_path / name).mkdir(mode=0o700)
    files = ExecutorFiles(
        str(tmp_path / "s"), str(tmp_path / "m"), str(tmp_path / "engine.log"), engine="tested"
    )

    def start(**knobs) -> FakeRayExecutor:
        executors.append(FakeRayExecutor(fake_ray_config(cluster.address, **knobs), None, files))
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()


def worker(cluster, rank: int):
    """The process of a worker, and its node."""
    for node in cluster.nodes:
        for process in node.engine_processes(f"nbengine: worker TP{rank} "):
            return process, node
    raise AssertionError(f"no worker {rank}")


def test_calls_and_answers_go_between_nodes_in_order(cluster, start_executor) -> None:
    executor = start_executor()
    assert {worker(cluster, rank)[1].directory.name for rank in (0, 1)} == {"n0", "n1"}
    assert executor.collective_rpc("rank") == [0, 1]
    assert executor.collective_rpc("pid") == [worker(cluster, rank)[0].pid for rank in (0, 1)]
    large = os.urandom(3 << 20)
    calls = [executor.collective_rpc("echo", (n, large), non_block=True) for n in range(8)]
    assert [call.result(60) for call in calls] == [[((n, large), {})] * 2 for n in range(8)]
    with pytest.raises(RuntimeError, match="out of order"):
        executor.collective_rpc("trouble", ("runtime", "runtime"))
    assert executor.collective_rpc("rank", unique_reply_rank=1) == 1


# Engine cores lose a keeper in each run, too.
@pytest.mark.parametrize("victim", amount(["worker", "actor"], thorough=["worker", "keeper", "actor"]))
def test_a_worker_that_is_lost_ends_all_calls_with_the_cause(cluster, start_executor, victim: str) -> None:
    executor = start_executor()
    process, node = worker(cluster, 1)
    waiting = executor.collective_rpc("trouble", ("native", "native"), non_block=True)
    chosen = {"worker": process, "keeper": process.parent(), "actor": node.actors()[0]}[victim]
    chosen.kill()
    with pytest.raises(EngineDeadError) as raised:
        waiting.result(NOTICED)
    ends = {
        "worker": r"was killed by signal 9 \(SIGKILL\)",
        "keeper": r"was lost on \S+ \(\S+\): its keeper has ended",
        "actor": r"was lost on \S+ \(\S+\): .*died",
    }
    assert re.match(rf"worker 1 \(TP1\), pid {process.pid}, {ends[victim]}", raised.value.cause)
    if victim == "worker":
        assert "rank 1 takes calls" in raised.value.log_tail
    executor.shutdown()
    cluster.wait_clean()


def test_a_worker_that_does_not_start_is_explained(cluster, start_executor) -> None:
    with pytest.raises(EngineStartError, match=r"worker 1 \(TP1\): 12 GiB of weights do not fit"):
        start_executor(ranks={"1": {"start_by": "memory"}})


def test_nothing_outlives_a_killed_engine_core(cluster, start_engine) -> None:
    config = fake_ray_config(cluster.address)
    engine = start_engine(parallel=config.parallel)
    engine.client().attach(START)
    assert len(cluster.leftovers()) > 4
    os.kill(engine.core().pid, signal.SIGKILL)
    engine.wait_gone()
    cluster.wait_clean()
