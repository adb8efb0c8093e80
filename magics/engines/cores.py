"""The engine cores of an engine in the tables of `%engine status`.

A single engine core has rows of names and values; several have a row each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nbengine.ipc.control_messages import EngineReady
from nbengine.magics.engines.workers import lone_worker_rows, step_time
from nbengine.metrics.stats import SchedulerStats
from nbengine.units import size
from nbengine.widgets.words import count, table

_HEADER = [
    "CORE",
    "PID",
    "STATE",
    "RUNNING",
    "WAITING",
    "KV BLOCKS",
    "CACHED",
    "REUSED",
    "STEPS",
    "PREEMPTED",
]


def lone_core_rows(stats: SchedulerStats, block_size: int, *, lock_step: bool) -> list[list[str]]:
    """Describe an engine core without others, as names and values."""
    hits, queries = stats.prefix_cache_hits, stats.prefix_cache_queries
    rate = f" ({hits / queries:.0%})" if queries else ""
    waves = [["wave", _wave(stats)]] if lock_step else []
    return [
        [
            "requests",
            f"{stats.num_running_reqs} running, {stats.num_waiting_reqs} waiting{_in_brackets(_held(stats))}",
        ],
        [
            "KV blocks",
            (f"{_blocks(stats)}, {stats.num_cached_blocks} cached, {block_size} tokens each"),
        ],
        ["prefix cache", f"{hits:,} of {queries:,} prompt tokens reused{rate}"],
        ["steps", f"{stats.step_counter:,}, {count(stats.num_preemptions, 'preemption')}"],
        *waves,
        *lone_worker_rows(stats),
    ]


def cores_table(
    engines: Iterable[SchedulerStats],
    ready_of: Mapping[int, EngineReady],
    size: int,
    silent: Sequence[int] = (),
    *,
    lock_step: bool,
) -> tuple[str, str]:
    """Make a table with a row for each of `size` engine cores, as (plain text, HTML).

    Engine cores that take no requests now or do not answer (`silent`) have a row, too.
    """
    waves = ["DUMMY STEPS", "WAVE"] if lock_step else []
    header = [*_HEADER, *waves, "MEMORY", "LAST STEP", "RESTARTS"]
    rows = {stats.engine_index: _row(stats, ready_of.get(stats.engine_index), lock_step) for stats in engines}
    for rank in set(range(size)) - rows.keys():
        state = "does not answer" if rank in silent else "starting"
        rows[rank] = [str(rank), "", state, *[""] * (len(header) - 3)]
    return table([row for _, row in sorted(rows.items())], header)


def _row(stats: SchedulerStats, ready: EngineReady | None, lock_step: bool) -> list[str]:
    queries = stats.prefix_cache_queries
    waves = [f"{stats.num_dummy_steps:,}", str(stats.current_wave)] if lock_step else []
    worker = stats.workers[0] if len(stats.workers) == 1 else None
    return [
        str(stats.engine_index),
        str(ready.pid) if ready is not None else "",
        _held(stats) or _state(stats, lock_step),
        str(stats.num_running_reqs),
        str(stats.num_waiting_reqs),
        _blocks(stats),
        str(stats.num_cached_blocks),
        f"{stats.prefix_cache_hits / queries:.0%}" if queries else "",
        f"{stats.step_counter:,}",
        str(stats.num_preemptions),
        *waves,
        size(sum(worker.memory_bytes for worker in stats.workers)) if stats.workers else "",
        step_time(worker) if worker is not None else "",
        str(ready.incarnation) if ready is not None else "",
    ]


def _state(stats: SchedulerStats, lock_step: bool) -> str:
    if lock_step:
        return "running" if stats.engines_running else "paused"
    return "busy" if stats.num_running_reqs + stats.num_waiting_reqs else "idle"


def _wave(stats: SchedulerStats) -> str:
    return f"{stats.current_wave}, {'running' if stats.engines_running else 'paused'}"


def _blocks(stats: SchedulerStats) -> str:
    in_use = stats.num_blocks - stats.num_free_blocks
    blocks = f"{in_use} of {stats.num_blocks} in use ({stats.kv_cache_usage:.0%})"
    if not stats.num_state_slots:
        return blocks
    slots = stats.num_state_slots - stats.num_free_state_slots
    states = f"{slots} of {stats.num_state_slots} state slots, {stats.num_checkpoints} checkpoints"
    return f"{blocks}, {states}" if stats.num_blocks else states


def _held(stats: SchedulerStats) -> str:
    """Say what keeps requests from running; empty if nothing does."""
    reasons = []
    if stats.is_paused:
        reasons.append("paused: `%engine resume` goes on")
    if stats.is_sleeping:
        reasons.append(f"asleep, level {stats.sleep_level}: `%engine wake` wakes it")
    return "; ".join(reasons)


def _in_brackets(text: str) -> str:
    return f" ({text})" if text else ""
