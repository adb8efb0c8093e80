"""States of a dashboard, made by a small scheduler that publishes its trace; the mirrors read it as they read an engine's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from nbengine.client.observe.trace_mirror import BlockMap, RequestView, StepView, TraceMirror
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.metrics.trace import (
    BlocksCached,
    BlocksUncached,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepDone,
    StepPlanned,
    TraceBatch,
    TraceEvent,
    TraceSnapshot,
)
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel, Rates
from nbengine.widgets.waves.timeline import WaveTimeline

START = 1_700_000_000.0
LABEL = EngineLabel("demo", "random-tiny", "1 engine core", "cpu", "float32")
RATES = Rates(1234.0, 87.5, 0.0123, 0.00345, 312 * 1024**2)


@dataclass
class _Job:
    number: int
    prompt: int
    group: int
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    output: int = 0
    was_admitted: bool = False


class SmallEngine:
    """Chunked prefills, preemption of the latest and a prefix cache by group of prompts, as simply as can be."""

    def __init__(
        self,
        *,
        num_blocks: int = 60,
        budget: int = 24,
        max_seqs: int = 6,
        rank: int = 0,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        self.mirror = TraceMirror(rank)
        self._num_blocks, self._block_size = num_blocks, block_size
        self._budget, self._max_seqs = budget, max_seqs
        self._random = random.Random(seed)
        self._refs = [0] * num_blocks
        self._hash_of: dict[int, tuple[int, int]] = {}
        self._found: dict[tuple[int, int], int] = {}
        self._free = list(range(num_blocks))
        self._waiting: list[_Job] = []
        self._running: list[_Job] = []
        self._events: list[TraceEvent] = []
        self._steps = self._added = self._preempted = self._queries = self._hits = 0
        self.time = START
        self.mirror.apply(
            TraceSnapshot(
                rank, 0, START, block_size, budget, max_seqs, [], BlocksCached([], []), self._statistics()
            )
        )

    def add(self, prompt: int, max_tokens: int, *, group: int = -1, name: str = "") -> int:
        """Add a request; those of a group have the same prompt, as far as both go."""
        number = self._added
        self._added += 1
        self._waiting.append(_Job(number, prompt, group, max_tokens))
        request_id = name or f"generate-{number}"
        total = prompt + max_tokens
        self._events.append(RequestAdded(number, request_id, 0, self.time, prompt, total, list(range(8))))
        return number

    def abort(self, number: int) -> None:
        """End a request as its client asks."""
        for jobs in (self._running, self._waiting):
            for job in [job for job in jobs if job.number == number]:
                self._end(job, jobs, "abort")

    def run(self, steps: int) -> None:
        """Make steps while there is work, and publish them."""
        for _ in range(steps):
            if self._running or self._waiting:
                self.step()

    def step(self) -> None:
        """Make one step."""
        budget, planned, admitted, new = self._budget, [], [], []
        for job in list(self._running):
            if job in self._running and (count := min(budget, self._needed(job))):
                if not self._make_room(job, count, new):
                    continue
                planned.append((job, count))
                budget -= count
        planned = [(job, count) for job, count in planned if job in self._running]
        while self._waiting and budget and len(self._running) < self._max_seqs:
            job = self._waiting[0]
            hit = self._look_up(job)
            count = min(budget, job.prompt + job.output - hit)
            if self._blocks_for(hit + count) - hit // self._block_size > len(self._free) - len(
                self._hit_blocks(job, hit)
            ):
                break
            self._waiting.pop(0)
            self._running.append(job)
            self._take_hit(job, hit, new)
            self._make_room(job, count, new)
            planned.append((job, count))
            admitted.append(job.number)
            budget -= count
        self._publish(planned, admitted, new)

    def _publish(
        self, planned: Sequence[tuple[_Job, int]], admitted: list[int], new: list[tuple[int, list[int]]]
    ) -> None:
        self._steps += 1
        numbers = [job.number for job, _ in planned]
        new = [(number, ids) for number, ids in new if number in numbers]
        counts, computed = [count for _, count in planned], [job.computed for job, _ in planned]
        self._events.append(StepPlanned(self._steps, self.time, numbers, counts, computed, admitted, new))
        self.time += self._random.uniform(0.004, 0.012)
        sampled = []
        for job, count in planned:
            job.computed += count
            self._store(job)
            done = job.computed >= job.prompt + job.output
            sampled.append(int(done))
            job.output += done
        self._events.append(StepDone(self._steps, self.time, sampled))
        for job, _ in planned:
            if job.output >= job.max_tokens:
                self._end(job, self._running, "length")
        self.time += 0.0005
        seq = (self.mirror.seq or 0) + 1
        batch = TraceBatch(self.mirror.engine_index, seq, self.time, self._events, self._statistics())
        assert self.mirror.apply(batch)
        self._events = []

    def _needed(self, job: _Job) -> int:
        return job.prompt + job.output - job.computed

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _make_room(self, job: _Job, count: int, new: list[tuple[int, list[int]]]) -> bool:
        lacking = self._blocks_for(job.computed + count) - len(job.blocks)
        while lacking > len(self._free):
            victim = self._running[-1]
            self._release(victim)
            self._running.remove(victim)
            victim.computed = 0
            self._waiting.insert(0, victim)
            self._preempted += 1
            self._events.append(RequestPreempted(victim.number))
            if victim is job:
                return False
        ids = [self._take_block() for _ in range(lacking)]
        job.blocks += ids
        if ids:
            new.append((job.number, ids))
        return True

    def _take_block(self) -> int:
        block = self._free.pop(0)
        if block in self._hash_of:
            del self._found[self._hash_of.pop(block)]
            self._events.append(BlocksUncached([block]))
        self._refs[block] = 1
        return block

    def _look_up(self, job: _Job) -> int:
        hit = 0
        while job.group >= 0 and (job.group, hit) in self._found and hit + self._block_size < job.prompt:
            hit += self._block_size
        return hit

    def _hit_blocks(self, job: _Job, hit: int) -> list[int]:
        ids = [self._found[job.group, start] for start in range(0, hit, self._block_size)]
        return [block for block in ids if not self._refs[block]]

    def _take_hit(self, job: _Job, hit: int, new: list[tuple[int, list[int]]]) -> None:
        self._queries += 0 if job.was_admitted else job.prompt
        self._hits += 0 if job.was_admitted else hit
        job.was_admitted = True
        job.computed = hit
        ids = [self._found[job.group, start] for start in range(0, hit, self._block_size)]
        for block in ids:
            if not self._refs[block]:
                self._free.remove(block)
            self._refs[block] += 1
        job.blocks = list(ids)
        if ids:
            new.append((job.number, ids))

    def _store(self, job: _Job) -> None:
        for index, block in enumerate(job.blocks[: min(job.computed, job.prompt) // self._block_size]):
            key = (job.group, index * self._block_size)
            if job.group >= 0 and key not in self._found:
                self._found[key] = block
                self._hash_of[block] = key
                self._events.append(BlocksCached([block], [0] * self._block_size))

    def _release(self, job: _Job) -> None:
        for block in reversed(job.blocks):
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)
        job.blocks = []

    def _end(self, job: _Job, jobs: list[_Job], reason: str) -> None:
        self._release(job)
        jobs.remove(job)
        self._events.append(RequestFinished(job.number, self.time, reason))

    def _statistics(self) -> SchedulerStats:
        return SchedulerStats(
            engine_index=self.mirror.engine_index,
            num_running_reqs=len(self._running),
            num_waiting_reqs=len(self._waiting),
            num_blocks=self._num_blocks,
            num_free_blocks=len(self._free),
            num_cached_blocks=len(self._found),
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            num_preemptions=self._preempted,
            step_counter=self._steps,
        )


def busy_engine(rank: int = 0, *, seed: int = 1) -> SmallEngine:
    """Chunks, prefix hits, shared blocks and preemptions, with requests left over."""
    engine = SmallEngine(rank=rank, seed=seed)
    for index in range(14):
        engine.add(30 + 9 * (index % 5), 20 + 8 * (index % 4), group=index % 2 if index % 7 else -1)
        engine.run(7)
    engine.run(22)
    return engine


def state_of(
    *engines: SmallEngine,
    label: EngineLabel = LABEL,
    rates: Rates = RATES,
    state: str = "running",
    own: Mapping[str, bool] | None = None,
    note: str = "",
    waves: WaveTimeline | None = None,
) -> DashboardState:
    """Make the state that a feed would give."""
    mirrors = {engine.mirror.engine_index: engine.mirror for engine in engines}
    now = max((engine.time for engine in engines), default=START)
    return DashboardState(
        label=label,
        state=state,
        time=now,
        stats=EngineStats([mirror.stats for mirror in mirrors.values()], timestamp=now),
        rates=rates,
        mirrors=mirrors,
        waves=waves or WaveTimeline(label.name, label.lock_step),
        own_requests=own or {},
        note=note,
    )


def vast_mirror(num_blocks: int = 100_000, num_requests: int = 256, *, seed: int = 5) -> TraceMirror:
    """As many requests and blocks as there may be, in the order that is hardest to draw: none."""
    source = np.random.default_rng(seed)
    mirror = TraceMirror(0)
    mirror.max_num_batched_tokens, mirror.max_num_seqs = 8192, num_requests
    mirror.blocks = blocks = BlockMap(num_blocks, 16)
    blocks.ref_counts[:] = source.choice([0, 1, 2, 9], num_blocks, p=[0.4, 0.4, 0.15, 0.05])
    blocks.cached[:] = source.random(num_blocks) < 0.5
    blocks.holder[:] = source.integers(0, num_requests, num_blocks)
    for number in range(num_requests):
        added = RequestAdded(number, f"request-{number}-{'x' * 60}", 0, START, 4000, 4200, [])
        mirror.requests[number] = RequestView(added, "running", 4000, 60, 128)
    for step in range(400):
        numbers = source.permutation(num_requests).tolist()
        prefills = numbers[::2]
        mirror.steps.append(
            StepView(
                step,
                START + step * 0.02,
                numbers,
                [1] * num_requests,
                [step] * num_requests,
                admitted=numbers[: num_requests // 3],
                preempted=numbers[num_requests // 2 :: 3],
                prefills=prefills,
                num_prefill_tokens=int(source.integers(0, 4000)),
                num_decode_tokens=int(source.integers(0, 256)),
                seconds=0.02,
                num_running=int(source.integers(0, 256)),
                num_waiting=int(source.integers(0, 256)),
            )
        )
    mirror.stats = SchedulerStats(0, num_requests, 0, num_blocks, blocks.num_free_blocks)
    return mirror
