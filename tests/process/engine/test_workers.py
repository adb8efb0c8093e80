"""The workers of an engine, seen by those who watch it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nbengine.metrics.stats import SchedulerStats, WorkerStats


def test_each_worker_is_in_what_the_engine_publishes_and_in_its_connection_file(start_engine) -> None:
    engine = start_engine({"workers": 3, "step_seconds": 0.002})
    client = engine.client().attach()
    watcher = client.subscribe()
    client.add("r", [1] * 20, max_tokens=10)
    client.wait_finished("r")
    seen = client.read_stats(watcher, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert [(row.rank, row.memory_bytes, row.num_steps) for row in seen.engines[0].workers] == [
        (rank, 1000 + rank, 10) for rank in range(3)
    ]
    assert [row.step_seconds for row in seen.engines[0].workers] == [0.002, 1.002, 2.002]
    (ready,) = engine.read_connection().ready
    assert [(worker.rank, worker.pid) for worker in ready.workers] == [
        (rank, engine.core().pid) for rank in range(3)
    ]


def test_the_page_of_the_workers_has_no_name_once_the_engine_runs(start_engine) -> None:
    engine = start_engine({"workers": 2})
    client = engine.client().attach()
    stats = msgspec.convert(client.call("stats")[1], SchedulerStats)
    assert stats.workers == [WorkerStats(rank) for rank in range(2)]
    assert not list(Path(engine.info.tensor_dir).glob("workers-*"))
    assert not list(engine.run_dir.glob("workers-*"))


def test_one_worker_in_the_core_is_a_row_of_its_own(start_engine) -> None:
    client = start_engine().client().attach()
    client.add("r", [1], max_tokens=3)
    client.wait_finished("r")
    watcher = client.subscribe()
    seen = client.read_stats(watcher, lambda s: s.engines[0].step_counter and not s.engines_running)
    assert seen.engines[0].workers == [WorkerStats(0, 1000, 3, 0.0)]
