"""Engines in tables and sentences: `%engine status`, `ps` and `stop`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

from nbengine.client.connection import ConnectionInfo, newest
from nbengine.client.directory import EngineListing, ReapReport
from nbengine.client.processes import session_processes
from nbengine.ipc.control_messages import EngineReady
from nbengine.magics.engines.cores import cores_table, lone_core_rows
from nbengine.magics.engines.workers import workers_table
from nbengine.magics.session import AttachedEngine
from nbengine.metrics.stats import EngineStats
from nbengine.units import size
from nbengine.widgets.words import age, count, seconds, table


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
    return sum(
        ready.weights_bytes + ready.kv_cache_bytes for ready in newest(info).ready if ready.device != "cpu"
    )


def resident_memory(info: ConnectionInfo) -> int:
    """Bytes of memory that an engine's processes use, shared ones included: what differs is what came or went."""
    resident = 0
    for process in session_processes(info):
        with contextlib.suppress(psutil.NoSuchProcess):
            resident += process.memory_info().rss
    return resident


def started_sentence(engine: AttachedEngine, took: float) -> str:
    """What has started, in one line."""
    return f"engine {engine.name!r} is ready after {seconds(took)}: {capacity(engine)}"


def capacity(engine: AttachedEngine) -> str:
    """Where an engine runs and how much it holds, all its engine cores together."""
    cores = list(cores_of(engine).values())
    first = cores[0]
    num_workers = sum(max(1, len(core.workers)) for core in cores)
    parts = [f"{len(cores)} engine cores"] if len(cores) > 1 else []
    parts += [f"{num_workers} workers"] if num_workers > len(cores) else []
    where = f"{' of '.join(parts)} on " if parts else ""
    num_blocks, num_bytes = (
        sum(core.num_blocks for core in cores),
        sum(core.kv_cache_bytes for core in cores),
    )
    cache = f"{count(num_blocks, 'block')} of {count(first.block_size, 'token')} ({size(num_bytes)})"
    return f"{where}{first.device} {first.dtype}, KV cache {cache}, context {count(first.max_model_len, 'token')}"


def cores_of(engine: AttachedEngine) -> dict[int, EngineReady]:
    """What each engine core said when it was ready, by rank; those that have joined since the start included."""
    ready = engine.client.ready
    return {core.rank: core for core in newest(engine.client.connection).ready} or {ready.rank: ready}


def status_table(engine: AttachedEngine, stats: EngineStats, *, is_default: bool) -> tuple[str, str]:
    """An engine's state as (plain text, HTML)."""
    config, ready, info = engine.client.config, engine.client.ready, engine.client.connection
    parallel, cores = config.parallel, cores_of(engine)
    num_cores = newest(info).config.parallel.data_parallel_size
    rows = [
        ["engine", engine.name + (" (default)" if is_default else "")],
        ["model", config.model.model],
        ["device", f"{ready.device} {ready.dtype}, weights {size(ready.weights_bytes)}"],
        [
            "topology",
            (
                f"TP {parallel.tensor_parallel_size} × PP {parallel.pipeline_parallel_size} × "
                f"DP {num_cores}, {count(parallel.world_size * num_cores, 'worker')}, "
                f"{count(len(session_processes(info)), 'process', 'processes')}"
            ),
        ],
        ["context", count(ready.max_model_len, "token")],
    ]
    if num_cores > 1:
        rows += _totals(stats, lock_step=config.lock_step)
    else:
        for core in stats.engines:
            rows += lone_core_rows(core, ready.block_size, lock_step=config.lock_step)
    rows += [
        ["up", f"{age(info.created)}; outlives its last notebook by {seconds(config.keep_alive)}"],
        ["log", info.log_path],
    ]
    tables = [table(rows)]
    if num_cores > 1:
        tables.append(cores_table(stats.engines, cores, num_cores, lock_step=config.lock_step))
    if any(len(core.workers) > 1 for core in stats.engines):
        tables.append(workers_table(stats.engines, cores, parallel))
    return "\n\n".join(plain for plain, _ in tables), "".join(html for _, html in tables)


def _totals(stats: EngineStats, *, lock_step: bool) -> list[list[str]]:
    """What the engine cores come to together, as names and values."""
    running = sum(core.num_running_reqs for core in stats.engines)
    waiting = sum(core.num_waiting_reqs for core in stats.engines)
    rows = [["requests", f"{running} running, {waiting} waiting"]]
    if lock_step:
        rows.append(["wave", f"{stats.current_wave}, {'running' if stats.engines_running else 'paused'}"])
    return rows


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
