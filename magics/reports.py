"""Engines in tables and sentences: `%engine status`, `ps` and `stop`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from nbengine.client.connection import ConnectionInfo
from nbengine.client.directory import EngineListing, ReapReport
from nbengine.client.processes import session_processes
from nbengine.ipc.messages import EngineReady
from nbengine.magics.render import age, count, seconds, table
from nbengine.magics.session import AttachedEngine
from nbengine.magics.workers import lone_worker_rows, workers_table
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.units import size


@dataclass(frozen=True)
class Footprint:
    """What an engine's processes hold: bytes of memory that no other process shares."""

    processes: int
    memory: int
    device_memory: int = 0
    """Bytes of weights and KV cache on a GPU."""

    def __str__(self) -> str:
        text = f"{size(self.memory)} of memory"
        return f"{text} and about {size(self.device_memory)} of GPU memory" if self.device_memory else text


def footprint(info: ConnectionInfo) -> Footprint:
    """Measure an engine's processes."""
    processes = memory = 0
    for process in session_processes(info):
        try:
            memory += process.memory_full_info().uss
        except psutil.AccessDenied:
            memory += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
        processes += 1
    return Footprint(processes, memory, device_memory(info))


def device_memory(info: ConnectionInfo) -> int:
    """Bytes of weights and KV cache on a GPU."""
    return sum(ready.weights_bytes + ready.kv_cache_bytes for ready in info.ready if ready.device != "cpu")


def resident_memory(info: ConnectionInfo) -> int:
    """Bytes of memory that an engine's processes use, shared ones included: what differs is what came or went."""
    resident = 0
    for process in session_processes(info):
        with contextlib.suppress(psutil.NoSuchProcess):
            resident += process.memory_info().rss
    return resident


def started_sentence(engine: AttachedEngine, took: float) -> str:
    """What has started, in one line."""
    return f"engine {engine.name!r} is ready after {seconds(took)}: {capacity(engine.client.ready)}"


def capacity(ready: EngineReady) -> str:
    """Where an engine runs and how much it holds."""
    cache = f"{count(ready.num_blocks, 'block')} of {count(ready.block_size, 'token')} ({size(ready.kv_cache_bytes)})"
    workers = f"{len(ready.workers)} workers on " if len(ready.workers) > 1 else ""
    where = f"{workers}{ready.device} {ready.dtype}"
    return f"{where}, KV cache {cache}, context {count(ready.max_model_len, 'token')}"


def status_table(engine: AttachedEngine, stats: EngineStats, *, is_default: bool) -> tuple[str, str]:
    """An engine's state as (plain text, HTML)."""
    config, ready, info = engine.client.config, engine.client.ready, engine.client.connection
    parallel = config.parallel
    rows = [
        ["engine", engine.name + (" (default)" if is_default else "")],
        ["model", config.model.model],
        ["device", f"{ready.device} {ready.dtype}, weights {size(ready.weights_bytes)}"],
        [
            "topology",
            (
                f"TP {parallel.tensor_parallel_size} × PP {parallel.pipeline_parallel_size} × "
                f"DP {parallel.data_parallel_size}, {count(parallel.world_size, 'worker')}, "
                f"{count(len(session_processes(info)), 'process', 'processes')}"
            ),
        ],
        ["context", count(ready.max_model_len, "token")],
    ]
    for rank in stats.engines:
        prefix = f"rank {rank.engine_index} " if len(stats.engines) > 1 else ""
        in_use = rank.num_blocks - rank.num_free_blocks
        hits, queries = rank.prefix_cache_hits, rank.prefix_cache_queries
        rate = f" ({hits / queries:.0%})" if queries else ""
        rows += [
            [
                f"{prefix}requests",
                f"{rank.num_running_reqs} running, {rank.num_waiting_reqs} waiting{_held(rank)}",
            ],
            [
                f"{prefix}KV blocks",
                (
                    f"{in_use} of {rank.num_blocks} in use ({rank.kv_cache_usage:.0%}), {rank.num_cached_blocks} cached, "
                    f"{ready.block_size} tokens each"
                ),
            ],
            [f"{prefix}prefix cache", f"{hits:,} of {queries:,} prompt tokens reused{rate}"],
            [f"{prefix}steps", f"{rank.step_counter:,}, {count(rank.num_preemptions, 'preemption')}"],
            *lone_worker_rows(rank, prefix),
        ]
    rows += [
        ["up", f"{age(info.created)}; outlives its last notebook by {seconds(config.keep_alive)}"],
        ["log", info.log_path],
    ]
    tables = [table(rows)]
    ready_of = {of_core.rank: of_core for of_core in (*info.ready, ready)}
    for core in stats.engines:
        if len(core.workers) > 1:
            tables.append(
                workers_table(ready_of.get(core.engine_index, ready).workers, core.workers, parallel)
            )
    return "\n\n".join(plain for plain, _ in tables), "".join(html for _, html in tables)


def _held(stats: SchedulerStats) -> str:
    """What keeps requests from running."""
    reasons = []
    if stats.is_paused:
        reasons.append("paused: `%engine resume` goes on")
    if stats.is_sleeping:
        reasons.append(f"asleep, level {stats.sleep_level}: `%engine wake` wakes it")
    return f" ({'; '.join(reasons)})" if reasons else ""


def engines_table(engines: Iterable[EngineListing], here: dict[str, str]) -> tuple[str, str]:
    """All engines as (plain text, HTML); `here` says what each attached one is to this notebook."""
    rows = [
        [
            engine.info.name,
            engine.info.config.model.model,
            engine.state,
            str(engine.num_clients),
            str(engine.info.host_pid),
            str(len(engine.pids)),
            size(engine.memory_bytes),
            age(engine.info.created),
            here.get(engine.info.name, ""),
        ]
        for engine in engines
    ]
    return table(
        rows, ["NAME", "MODEL", "STATE", "CLIENTS", "PID", "PROCESSES", "MEMORY", "AGE", "THIS NOTEBOOK"]
    )


def reap_sentences(report: ReapReport) -> str:
    """What was cleaned up, a line each."""
    lines = [f"cleaned up after engine {name!r}, which had died" for name in report.dead]
    lines += [f"ended engine {name!r}, which nobody was attached to" for name in report.ended]
    if report.killed_pids:
        lines.append(f"killed {count(len(report.killed_pids), 'process', 'processes')} without a host")
    if report.removed_dirs:
        lines.append(f"removed {count(len(report.removed_dirs), 'directory', 'directories')} of sockets")
    return "\n".join(lines) or "nothing to reap"
