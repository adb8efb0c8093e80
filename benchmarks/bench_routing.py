"""Measure what it costs a client to choose an engine core: microseconds a request, by the number of ranks.

"route" is the choice and the entry in the map of requests in flight; "whole life" adds the first output and
the end; "affinity" is the choice by the first blocks of a prompt of 1024 tokens (64 of them hashed);
"snapshot" is taking in the coordinator's statistics, ten times a second.

python benchmarks/bench_routing.py [--json PATH] [--requests 20000]
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from common import parser, report

from nbengine.client.routing.request_router import RequestRouter
from nbengine.config import EngineConfig, ModelConfig, ParallelConfig
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from nbengine.metrics.stats import EngineStats, SchedulerStats
from nbengine.sampling_params import SamplingParams

SIZES = (1, 8, 64, 256)
PROMPT = list(range(1024))


def make_router(size: int, *, affinity: bool = False) -> RequestRouter:
    """Make a router with `size` idle ranks."""
    parallel = ParallelConfig(data_parallel_size=size, data_parallel_prefix_affinity=affinity)
    router = RequestRouter(dataclasses.replace(EngineConfig(model=ModelConfig(model="m")), parallel=parallel))
    for rank in range(size):
        router.on_ready(EngineReady(rank, 4096, 16, 4096, 0, 0, "cpu", "float32", [], 0))
        router.table.on_connected(rank, 0, 0)
    router.table.set_ranks(range(size))
    router.update()
    return router


def requests(count: int, prompt: list[int]) -> list[EngineCoreRequest]:
    """Make `count` different requests."""
    params = SamplingParams()
    return [EngineCoreRequest(f"request-{i}", prompt, params, external_req_id=str(i)) for i in range(count)]


def route_all(router: RequestRouter, batch: list[EngineCoreRequest]) -> float:
    """Return the microseconds of routing a request."""
    start = time.perf_counter()
    for request in batch:
        router.route(request)
    return (time.perf_counter() - start) / len(batch) * 1e6


def end_all(router: RequestRouter) -> float:
    """Return the microseconds of a request's first output and its end, which come in batches of 32."""
    by_rank: dict[int, list[str]] = {}
    for name, entry in router._in_flight.items():
        by_rank.setdefault(entry.home.rank, []).append(name)
    count, seconds = router.num_in_flight, 0.0
    for rank, names in by_rank.items():
        for first in range(0, len(names), 32):
            for reason in (None, FinishReason.LENGTH):
                outputs = [
                    EngineCoreOutput(name, [1], finish_reason=reason) for name in names[first : first + 32]
                ]
                start = time.perf_counter()
                router.take_in(EngineCoreOutputs(engine_index=rank, outputs=outputs))
                seconds += time.perf_counter() - start
    return seconds / count * 1e6


def snapshots(router: RequestRouter, size: int, count: int = 200) -> float:
    """Return the microseconds of taking in a snapshot."""
    seconds = 0.0
    for step in range(count):
        engines = [SchedulerStats(rank, 3, 1, step_counter=step) for rank in range(size)]
        start = time.perf_counter()
        router.balancer.observe(EngineStats(engines=engines))
        seconds += time.perf_counter() - start
    return seconds / count * 1e6


def measure(size: int, count: int, rounds: int) -> dict[str, Any]:
    """Measure one row."""
    figures: dict[str, list[float]] = {
        "route µs": [],
        "whole life µs": [],
        "affinity µs": [],
        "snapshot µs": [],
    }
    batch, long_batch = requests(count, [1, 2, 3]), requests(max(1, count // 10), PROMPT)
    for _ in range(rounds):
        router = make_router(size)
        routed = route_all(router, batch)
        figures["route µs"].append(routed)
        figures["whole life µs"].append(routed + end_all(router))
        figures["snapshot µs"].append(snapshots(router, size))
        figures["affinity µs"].append(route_all(make_router(size, affinity=True), long_batch))
    return {"ranks": size} | {name: statistics.median(values) for name, values in figures.items()}


def main() -> None:
    """Measure each size."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=20_000)
    arguments = options.parse_args()
    rows = [measure(size, arguments.requests, arguments.rounds) for size in SIZES]
    report("routing of requests in the client", rows, arguments.json)


if __name__ == "__main__":
    main()
