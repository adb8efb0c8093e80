"""The statistics schema, on the wire and in public: one definition for both."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from nbengine.metrics.requests import RequestStats


class WorkerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One worker of an engine core."""

    rank: int = 0
    memory_bytes: int = 0
    """Memory that the worker holds: on a GPU what torch has allocated there, on a CPU the resident set of its
    process. It was measured at the latest step or up to a second before, or at the latest sleep or
    wake-up."""
    num_steps: int = 0
    """Steps with tokens since the start."""
    step_seconds: float = 0.0
    """Time that the worker's part of the latest step took, waiting for other workers included; of steps that were
    computed at once each has an equal share."""


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """State of one engine's scheduler and KV cache after a step; counters never go down, except where a field
    says otherwise."""

    engine_index: int = 0
    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks with reference count 0, cached or not; equals `num_blocks` when idle."""
    num_cached_blocks: int = 0
    """Blocks whose contents can be found by hash, in use or not."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up, since the start."""
    prefix_cache_hits: int = 0
    """Prompt tokens found, since the start."""
    num_preemptions: int = 0
    step_counter: int = 0
    """Steps since the start; in lock step, turns since the wave began."""
    current_wave: int = 0
    engines_running: bool = False
    """In lock step: True while this rank steps, even if it has no requests itself."""
    num_dummy_steps: int = 0
    """In lock step: steps since the start in which this rank had no requests itself."""
    is_paused: bool = False
    """New requests wait until the engine is resumed."""
    sleep_level: int = 0
    """0: awake; 1: without KV cache, weights in host memory; 2: without either."""
    workers: list[WorkerStats] = []
    """The engine core's workers, by rank."""
    is_kept_asleep: bool = False
    """While it sleeps, requests are refused instead of waiting."""
    num_state_slots: int = 0
    """Slots for the states of recurrent layers; 0 for a model without such layers."""
    num_free_state_slots: int = 0
    """Slots that no request holds, checkpoints included; equals `num_state_slots` when idle."""
    num_checkpoints: int = 0
    """States of recurrent layers that can be found by the tokens before them."""
    num_prompt_tokens: int = 0
    """Tokens of the prompts of requests that have a token or a result, found in the cache or not, since the
    start."""
    num_generation_tokens: int = 0
    """Tokens sampled, since the start."""
    requests: RequestStats | None = None
    """Times and sizes of requests. In a report of an engine core, None if they are those of its report before; a
    trace never has them."""
    num_prefill_steps: int = 0
    """Steps since the start in which a request read its prompt for the first time, and none read again."""
    num_recompute_steps: int = 0
    """Steps since the start in which a request read again after a preemption."""

    @property
    def is_sleeping(self) -> bool:
        """Tell whether the engine has given memory back; requests wait until it wakes up."""
        return self.sleep_level > 0

    @property
    def kv_cache_usage(self) -> float:
        """Return the share of the blocks in use, from 0 to 1; of a model without blocks, that of the slots."""
        used, total = cache_use([self])
        return used / total if total else 0.0


def cache_use(engines: Collection[SchedulerStats]) -> tuple[int, int]:
    """Return how many blocks of the engine cores' KV caches are in use, and how many there are; the slots of a model
    whose layers all keep a state, which has no blocks."""
    total = sum(engine.num_blocks for engine in engines)
    if total:
        return total - sum(engine.num_free_blocks for engine in engines), total
    slots = sum(engine.num_state_slots for engine in engines)
    return slots - sum(engine.num_free_state_slots for engine in engines), slots


class EngineStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A step-consistent snapshot of all engines behind one client, as the coordinator publishes it."""

    engines: list[SchedulerStats] = []
    current_wave: int = 0
    engines_running: bool = False
    timestamp: float = 0.0
    """`time.time()` of the snapshot."""
