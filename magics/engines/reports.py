"""Tables and sentences about engines, for `%engine status`, `ps` and `stop`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from nbengine.client.engines.directory import EngineListing, ReapReport
from nbengine.client.engines.processes import resident_bytes, session_processes
from nbengine.ipc.control_messages import EngineReady
from nbengine.magics.engines.cores import cores_table, lone_core_rows
from nbengine.magics.engines.workers import workers_table
from nbengine.magics.session import AttachedEngine
from nbengine.metrics.stats import EngineStats
from nbengine.runtime.connection import ConnectionInfo, newest
from nbengine.server.records import servers_of
from nbengine.units import size
from nbengine.widgets.words import age, count, seconds, table


@dataclass(frozen=True)
class Footprint:
    """The resources that an engine's processes hold; `memory` is the bytes that no other process shares."""

    processes: int
    memory: int
    device_memory: int = 0
    """The bytes of weights and KV cache on a GPU."""

    def __str__(self) -> str:
        text = f"{size(self.memory)} of memory"
        return f"{text} and about {size(self.device_memory)} of GPU memory" if self.device_memory else text


def footprint(info: ConnectionInfo) -> Footprint:
    """Measure an engine's processes."""
    processes = memory = 0
    for process in session_processes(info):
        try:
            memory += psutil.Process(process.pid).memory_full_info().uss
        except psutil.AccessDenied:
            memory += resident_bytes(process)
        except psutil.NoSuchProcess:
            continue
        processes += 1
    return Footprint(processes, memory, device_memory(info))


def device_memory(info: ConnectionInfo) -> int:
    """Sum the bytes of weights and KV cache on a GPU."""
    return sum(
        ready.weights_bytes + ready.kv_cache_bytes for ready in newest(info).ready if ready.device != "cpu"
    )


def resident_memory(info: ConnectionInfo) -> int:
    """Sum the bytes of memory that an engine's processes use, shared ones included.

    Shared bytes are counted several times, so only differences of two sums mean anything.
    """
    return sum(map(resident_bytes, session_processes(info)))


def started_sentence(engine: AttachedEngine, took: float) -> str:
    """Say in one line that an engine has started, how long that took, and what it holds."""
    return f"engine {engine.name!r} is ready after {seconds(took)}: {capacity(engine)}{_cost(engine)}"


def _cost(engine: AttachedEngine) -> str:
    """Say whose layers run and what they cost, unless they are nbengine's."""
    name = _implementation(engine.client.ready)
    return f"; its layers are {name}'s, which take longer than nbengine's own" if name else ""


def _implementation(ready: EngineReady) -> str:
    return next((worker.implementation for worker in ready.workers if worker.implementation), "")


def capacity(engine: AttachedEngine) -> str:
    """Describe where an engine runs and how much it holds, all its engine cores together."""
    cores = list(cores_of(engine).values())
    first = cores[0]
    num_workers = sum(max(1, len(core.workers)) for core in cores)
    parts = [f"{len(cores)} engine cores"] if len(cores) > 1 else []
    parts += [f"{num_workers} workers"] if num_workers > len(cores) else []
    where = f"{' of '.join(parts)} on " if parts else ""
    limit = count(first.max_model_len, "token")
    return f"{where}{first.device} {first.dtype}, KV cache {cache_words(cores)}, context {limit}"


def cache_words(cores: Sequence[EngineReady]) -> str:
    """Say what the caches of all engine cores hold together: blocks of tokens, slots for recurrent state, or both."""
    num_blocks, num_slots, num_bytes = (
        sum(getattr(core, name) for core in cores)
        for name in ("num_blocks", "num_state_slots", "kv_cache_bytes")
    )
    parts = [f"{count(num_slots, 'slot')} for recurrent state"] if num_slots else []
    if num_blocks or not num_slots:
        parts.insert(0, f"{count(num_blocks, 'block')} of {count(cores[0].block_size, 'token')}")
    return f"{' and '.join(parts)} ({size(num_bytes)})"


def cores_of(engine: AttachedEngine) -> dict[int, EngineReady]:
    """Return the `EngineReady` of each engine core by rank, also of those that joined after the start."""
    ready = engine.client.ready
    return {core.rank: core for core in newest(engine.client.connection).ready} or {ready.rank: ready}


def _kernel_rows(ready: EngineReady) -> list[list[str]]:
    """List the kernels that an engine core's workers compute with, if they name any."""
    names = sorted({worker.kernels for worker in ready.workers if worker.kernels})
    rows = [["kernels", "; ".join(names)]] if names else []
    implementation = _implementation(ready)
    return [["layers", f"{implementation} (slower than nbengine's own)"], *rows] if implementation else rows


def status_table(
    engine: AttachedEngine, stats: EngineStats, silent: Sequence[int], *, is_default: bool
) -> tuple[str, str]:
    """Make an engine's table as (plain text, HTML); `silent` has the engine cores that did not answer."""
    config, ready, info = engine.client.config, engine.client.ready, engine.client.connection
    parallel, cores = config.parallel, cores_of(engine)
    written = newest(info)
    num_cores = written.config.parallel.data_parallel_size
    rows = [
        ["engine", engine.name + (" (default)" if is_default else "")],
        ["model", config.model.model],
        ["device", f"{ready.device} {ready.dtype}, weights {size(ready.weights_bytes)}"],
        *_kernel_rows(ready),
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
    standing = "; ".join(filter(None, (_silence(silent), engine.client.stall)))
    if standing:
        rows.append(["progress", standing])
    if num_cores > 1:
        rows += _totals(stats, lock_step=config.lock_step)
    else:
        for core in stats.engines:
            rows += lone_core_rows(core, ready.block_size, lock_step=config.lock_step)
    rows += [
        ["up", f"{age(info.created)}; outlives its last notebook by {seconds(config.keep_alive)}"],
        ["log", info.log_path],
    ]
    if written.metrics_address:
        rows.append(["metrics", written.metrics_address])
    rows += [["server", str(record)] for record in servers_of(written)]
    tables = [table(rows)]
    if num_cores > 1:
        tables.append(cores_table(stats.engines, cores, num_cores, silent, lock_step=config.lock_step))
    if any(len(core.workers) > 1 for core in stats.engines):
        tables.append(workers_table(stats.engines, cores, parallel))
    return "\n\n".join(plain for plain, _ in tables), "".join(html for _, html in tables)


def _silence(ranks: Sequence[int]) -> str:
    """Name the engine cores that do not answer; empty if all do."""
    if not ranks:
        return ""
    cores, verb = ("core", "does") if len(ranks) == 1 else ("cores", "do")
    return f"{cores} {', '.join(map(str, ranks))} {verb} not answer"


def _totals(stats: EngineStats, *, lock_step: bool) -> list[list[str]]:
    """Sum up the engine cores, as names and values."""
    running = sum(core.num_running_reqs for core in stats.engines)
    waiting = sum(core.num_waiting_reqs for core in stats.engines)
    rows = [["requests", f"{running} running, {waiting} waiting"]]
    if lock_step:
        rows.append(["wave", f"{stats.current_wave}, {'running' if stats.engines_running else 'paused'}"])
    return rows


def engines_table(engines: Iterable[EngineListing], here: dict[str, str]) -> tuple[str, str]:
    """Make the table of all engines as (plain text, HTML); `here` has the state of those attached here."""
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
    """Report what was cleaned up, a line each."""
    lines = [f"cleaned up after engine {name!r}, which had died" for name in report.dead]
    lines += [f"ended engine {name!r}, which nobody was attached to" for name in report.ended]
    if report.killed_pids:
        lines.append(f"killed {count(len(report.killed_pids), 'process', 'processes')} without a host")
    if report.removed_dirs:
        lines.append(f"removed {count(len(report.removed_dirs), 'directory', 'directories')} of sockets")
    return "\n".join(lines) or "nothing to reap"
