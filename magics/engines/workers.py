"""The workers of an engine in the tables of `%engine status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nbengine.config import ParallelConfig
from nbengine.distributed.layout import RankLayout
from nbengine.ipc.control_messages import EngineReady, WorkerInfo
from nbengine.metrics.stats import SchedulerStats, WorkerStats
from nbengine.units import size
from nbengine.widgets.words import table

_HEADER = ["RANK", "WORKER", "PID", "DEVICE", "LAYERS", "WEIGHTS", "KV CACHE", "MEMORY", "STEPS", "LAST STEP"]


def lone_worker_rows(stats: SchedulerStats) -> list[list[str]]:
    """List the rows that a lone worker adds to its engine's own table; none if there are several workers."""
    if len(stats.workers) != 1:
        return []
    (worker,) = stats.workers
    rows = [["memory", size(worker.memory_bytes)]]
    if worker.num_steps:
        rows.append(["last step", step_time(worker)])
    return rows


def workers_table(
    engines: Sequence[SchedulerStats], ready_of: Mapping[int, EngineReady], parallel: ParallelConfig
) -> tuple[str, str]:
    """Make a table with a row for each worker of every engine core, as (plain text, HTML)."""
    rows = []
    for core in engines:
        ready = ready_of.get(core.engine_index)
        info_of = {info.rank: info for info in (ready.workers if ready is not None else ())}
        prefix = f"DP{core.engine_index} " if len(engines) > 1 else ""
        rows += [_row(worker, info_of.get(worker.rank), prefix, parallel) for worker in core.workers]
    return table(rows, _HEADER)


def step_time(worker: WorkerStats) -> str:
    """Format the duration of the worker's part of the latest step; empty before the first step."""
    return f"{worker.step_seconds * 1000:,.1f} ms" if worker.num_steps else ""


def _row(worker: WorkerStats, info: WorkerInfo | None, prefix: str, parallel: ParallelConfig) -> list[str]:
    known = ["", "", "", "", ""]
    if info is not None:
        held = size(info.weights_bytes), size(info.kv_cache_bytes)
        known = [str(info.pid), info.device, _layers(info), *held]
    return [
        str(worker.rank),
        f"{prefix}{RankLayout.of(worker.rank, parallel)}",
        *known,
        size(worker.memory_bytes),
        f"{worker.num_steps:,}",
        step_time(worker),
    ]


def _layers(info: WorkerInfo) -> str:
    """Format a worker's layers: `0–14`, `3`, or `none`."""
    last = info.first_layer + info.num_layers - 1
    return (
        "none" if not info.num_layers else f"{info.first_layer}–{last}" if info.num_layers > 1 else str(last)
    )
