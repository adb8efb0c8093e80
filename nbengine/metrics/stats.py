"""The statistics schema, on the wire and in public: one definition for both."""

from __future__ import annotations

import msgspec


class WorkerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One worker of an engine core."""

    rank: int = 0
    memory_bytes: int = 0
    """What the worker holds: on a GPU what torch has allocated there, on a CPU the resident set of its process. As of
    its latest step, or a second before; and of the latest sleep or wake-up."""
    num_steps: int = 0
    """Steps with tokens since the start."""
    step_seconds: float = 0.0
    """Time that its part of the latest step took, waiting for other workers included."""


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """State of one engine's scheduler and KV cache after a step; counters never go down, except where it says so."""

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
    """In lock step: whether this rank steps, with work of its own or without."""
    num_dummy_steps: int = 0
    """In lock step: steps without work of its own, since the start."""
    is_paused: bool = False
    """New requests wait until the engine is resumed."""
    sleep_level: int = 0
    """0: awake; 1: without KV cache, weights in host memory; 2: without either."""
    workers: list[WorkerStats] = []
    """By rank."""

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine has given memory back; requests wait until it wakes up."""
        return self.sleep_level > 0

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


class EngineStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A step-consistent snapshot of all engines behind one client, as the coordinator publishes it."""

    engines: list[SchedulerStats] = []
    current_wave: int = 0
    engines_running: bool = False
    timestamp: float = 0.0
    """`time.time()` of the snapshot."""
