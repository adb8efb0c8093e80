"""Measure what the scheduler and the KV cache cost a step, without a model.

    python benchmarks/bench_scheduler.py [--json PATH] [--only decode|new]

Decoding: schedule(), and update_from_output() with make_stats(), of a step in which every request computes
one token; prompts of 128 tokens and up, so that block boundaries spread over the steps. New requests: 256
prompts of 1,000 tokens, the first 800 of them shared, admitted in one step: making and hashing the request,
add_request(), schedule() and update_from_output(), a request each; then the lookup in the prefix cache and
the allocation by themselves, in a fresh cache. The queue: 100,000 requests of two clients wait; one more is
added, the next is admitted, and one is aborted (the middle of what is left), a request each. Medians, in
microseconds, prefix caching on.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections import deque
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

from common import parser, report

from nbengine.config import CacheConfig, SchedulerConfig
from nbengine.sampling_params import SamplingParams
from nbengine.scheduler.options import SchedulerOptions
from nbengine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from nbengine.scheduler.request import Request
from nbengine.scheduler.scheduler import Scheduler
from nbengine.scheduler.waiting import WaitingQueue

NUM_BLOCKS = 40_000
MAX_MODEL_LEN = 8192
VOCAB_SIZE = 49_000
WARMUP_STEPS = 20
PROMPT, SHARED = 1000, 800
NEW_REQUESTS_BUDGET = 65_536


def make_scheduler(max_num_seqs: int, budget: int, *, ahead: bool = False) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
    options = SchedulerOptions(async_scheduling=ahead)
    return Scheduler(config, CacheConfig(), NUM_BLOCKS, MAX_MODEL_LEN, options=options)


def make_request(name: str, prompt: list[int], params: SamplingParams, scheduler: Scheduler) -> Request:
    return Request(name, prompt, params, block_hasher=scheduler.kv_cache_manager.block_hasher)


def sample(plan: SchedulerOutput, rng: random.Random) -> ModelRunnerOutput:
    names = list(plan.num_scheduled_tokens)
    tokens = [[] if n in plan.incomplete_req_ids else [rng.randrange(3, VOCAB_SIZE)] for n in names]
    return ModelRunnerOutput(names, tokens)


def settle() -> None:
    gc.collect()
    gc.freeze()


def decode(
    num_requests: int, num_waiting: int, steps: int, repeats: int, *, ahead: bool = False
) -> dict[str, float]:
    """Return the microseconds of a decoding step of `num_requests`, with `num_waiting` more that are not
    admitted.

    With `ahead` each step is planned before the one before it is answered.
    """
    rng = random.Random(7)
    params = SamplingParams(temperature=0, max_tokens=4096, ignore_eos=True)
    schedule, update, both = [], [], []
    for _ in range(repeats):
        scheduler = make_scheduler(num_requests, 8192, ahead=ahead)
        for i in range(num_requests + num_waiting):
            prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(128 + i % 16)]
            scheduler.add_request(make_request(f"r{i}", prompt, params, scheduler))
        while any(request.num_output_tokens == 0 for request in scheduler.running) or not scheduler.running:
            plan = scheduler.schedule()
            scheduler.update_from_output(plan, sample(plan, rng))
        settle()
        in_flight = deque([scheduler.schedule()] if ahead else [])
        for number in range(WARMUP_STEPS + steps):
            t0 = perf_counter_ns()
            in_flight.append(scheduler.schedule())
            t1 = perf_counter_ns()
            plan = in_flight.popleft()
            output = sample(plan, rng)
            t2 = perf_counter_ns()
            scheduler.update_from_output(plan, output)
            scheduler.make_stats()
            t3 = perf_counter_ns()
            if number >= WARMUP_STEPS:
                schedule.append(t1 - t0)
                update.append(t3 - t2)
                both.append(t1 - t0 + t3 - t2)
        gc.unfreeze()
    parts = {"schedule": schedule, "update": update, "total": both}
    return {name: _median_us(samples) for name, samples in parts.items()}


def new_requests(count: int, repeats: int) -> dict[str, float]:
    """Return the microseconds of a new request, from its tokens to its first output."""
    rng = random.Random(7)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    init: list[float] = []
    add, schedule, update = [], [], []
    lookup: list[float] = []
    allocate: list[float] = []
    for _ in range(repeats):
        scheduler = make_scheduler(count, NEW_REQUESTS_BUDGET)
        shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(SHARED)]
        own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(PROMPT - SHARED)] for _ in range(count)]
        prompts = [shared + tokens for tokens in own]
        settle()
        requests = []
        for i, prompt in enumerate(prompts):
            t0 = perf_counter_ns()
            requests.append(make_request(f"p{i}", prompt, params, scheduler))
            init.append(perf_counter_ns() - t0)
        t0 = perf_counter_ns()
        for request in requests:
            scheduler.add_request(request)
        t1 = perf_counter_ns()
        plan = scheduler.schedule()
        t2 = perf_counter_ns()
        output = sample(plan, rng)
        t3 = perf_counter_ns()
        scheduler.update_from_output(plan, output)
        update.append((perf_counter_ns() - t3) / count)
        add.append((t1 - t0) / count)
        schedule.append((t2 - t1) / count)
        found = scheduler.make_stats().prefix_cache_hits
        if found != (count - 1) * SHARED:
            raise SystemExit(f"{found} tokens found in the prefix cache, {(count - 1) * SHARED} expected")
        for samples, times in zip((lookup, allocate), _admissions(prompts, params), strict=True):
            samples += times
        gc.unfreeze()
    parts: dict[str, list[float]] = {
        "init_and_hash": init,
        "add": add,
        "schedule": schedule,
        "update": update,
    }
    row = {name: _median_us(samples) for name, samples in parts.items()}
    row["total"] = round(sum(row.values()), 2)
    return row | {"lookup": _median_us(lookup), "allocate": _median_us(allocate)}


def _admissions(prompts: list[list[int]], params: SamplingParams) -> tuple[list[int], list[int]]:
    """Return the nanoseconds of each request's lookup, and of its allocation and entry into the prefix
    cache."""
    manager = make_scheduler(len(prompts), NEW_REQUESTS_BUDGET).kv_cache_manager
    lookup, allocate = [], []
    for i, prompt in enumerate(prompts):
        request = Request(f"m{i}", prompt, params, block_hasher=manager.block_hasher)
        t0 = perf_counter_ns()
        block_ids, num_computed = manager.get_computed_blocks(request)
        t1 = perf_counter_ns()
        manager.allocate_slots(request, PROMPT - num_computed, block_ids)
        request.num_computed_tokens = PROMPT
        manager.cache_blocks(request)
        t2 = perf_counter_ns()
        if num_computed != (SHARED if i else 0):
            raise SystemExit(f"{num_computed} tokens of request {i} found in the prefix cache")
        lookup.append(t1 - t0)
        allocate.append(t2 - t1)
    return lookup, allocate


def queue(count: int, operations: int = 2000) -> dict[str, float]:
    """Return the microseconds that an operation on a queue of `count` requests takes."""
    params = SamplingParams()
    waiting = WaitingQueue()
    requests = []
    for i in range(count + operations):
        request = Request(f"q{i}", [1], params, client_index=i % 2)
        request.order = (0, 0, 0.0, i)
        requests.append(request)
    for request in requests[:count]:
        waiting.add(request)
    settle()
    add, admit, abort = [], [], []
    for i in range(operations):
        t0 = perf_counter_ns()
        waiting.add(requests[count + i])
        t1 = perf_counter_ns()
        first = waiting.first()
        if first is None:
            raise SystemExit("the queue is empty")
        waiting.admit(first)
        t2 = perf_counter_ns()
        waiting.remove(requests[count // 2 + i])
        t3 = perf_counter_ns()
        add.append(t1 - t0)
        admit.append(t2 - t1)
        abort.append(t3 - t2)
    gc.unfreeze()
    return {"add": _median_us(add), "admit": _median_us(admit), "abort": _median_us(abort)}


def _median_us(samples: Sequence[float]) -> float:
    return round(statistics.median(samples) / 1e3, 2)


def main() -> None:
    """Measure one row for each case; the parts of a total stand beside it."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument(
        "--only",
        choices=("decode", "ahead", "waiting", "new", "queue"),
        help="measure this kind of row alone",
    )
    options.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256], help="decoding ones")
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    kinds = (arguments.only,) if arguments.only else ("decode", "ahead", "waiting", "new", "queue")
    if "decode" in kinds:
        for count in arguments.requests:
            figures = decode(count, 0, arguments.steps, arguments.rounds)
            rows.append({"µs": f"decode {count}", **figures})
    if "ahead" in kinds:
        for count in arguments.requests:
            figures = decode(count, 0, arguments.steps, arguments.rounds, ahead=True)
            rows.append({"µs": f"decode {count}, one step in flight", **figures})
    if "waiting" in kinds:
        rows.append({"µs": "decode 256, 10000 waiting", **decode(256, 10_000, arguments.steps, 1)})
    if "new" in kinds:
        name = f"new request of {PROMPT} tokens, {SHARED} shared"
        rows.append({"µs": name, **new_requests(256, arguments.rounds)})
    if "queue" in kinds:
        rows.append({"µs": "queue of 100000", **queue(100_000)})
    report("scheduler and KV cache", rows, arguments.json)


if __name__ == "__main__":
    main()
