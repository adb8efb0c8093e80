"""Measure what a worker in its own process adds to a step, beside an engine core with its worker inside.

    python benchmarks/bench_executor.py [--json PATH] [--steps N]

Microseconds a decoding step of N requests through `EngineCore.step_fn`, everything included. "no model": a
worker that answers at once, so that all of the difference is the way to it and back. "2 ms": a device that
computes for 2 ms while its worker sleeps, so that the ends of the queues sleep, too, and are woken.
"random-tiny": the smallest model, on the CPU. Limit: 150 µs more.
"""

from __future__ import annotations

import gc
import os
import statistics
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest.mock import patch

from common import alternate, parser, report
from instant_worker import InstantWorker, InstantWorkersExecutor

from nbengine.config import EngineArgs, EngineConfig, ModelConfig, SchedulerConfig
from nbengine.engine.core.core import EngineCore
from nbengine.executor.multiproc import MultiprocExecutor
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.models.checkpoints.files import resolve_model
from nbengine.sampling_params import SamplingParams

PROMPT_TOKENS = 16
WARMUP_STEPS = 20
LIMIT_US = 150


def without_model() -> tuple[EngineCore, EngineCore]:
    """Make two cores whose workers only answer: one with the worker inside, one with the worker beside."""
    config = EngineConfig(ModelConfig("fake"), scheduler=SchedulerConfig(async_scheduling=False))
    with patch("nbengine.executor.uniproc.Worker", InstantWorker):
        inside = EngineCore(config, UniProcExecutor)
    return inside, EngineCore(config, InstantWorkersExecutor)


def with_model(name: str) -> tuple[EngineCore, EngineCore]:
    """Make two such cores with a model on the CPU."""
    args = EngineArgs(model=name, device="cpu", kv_cache_memory_bytes=1 << 26, async_scheduling=False)
    config = args.create_engine_config(bound=True)
    config = replace(config, model=resolve_model(config.model))
    return EngineCore(config, UniProcExecutor), EngineCore(config, MultiprocExecutor)


def step_microseconds(core: EngineCore, num_requests: int, steps: int) -> float:
    """Return the median time of a decoding step."""
    params = SamplingParams(temperature=0, max_tokens=steps + WARMUP_STEPS + 1, ignore_eos=True)
    for number in range(num_requests):
        prompt = [(7 * number + 3 * i) % 200 + 10 for i in range(PROMPT_TOKENS)]
        request = EngineCoreRequest(f"r{number}", prompt, params)
        core.add_request(*core.preprocess_add_request(request))
    gc.collect()
    for _ in range(WARMUP_STEPS):
        core.step_fn()
    times = []
    for _ in range(steps):
        start = perf_counter_ns()
        core.step_fn()
        times.append(perf_counter_ns() - start)
    core.abort_all()
    while core.has_work():
        core.step_fn()
    core.take_unsent_outputs()
    return statistics.median(times) / 1e3


def compare(cores: tuple[EngineCore, EngineCore], what: str, steps: int, rounds: int) -> list[dict[str, Any]]:
    """Measure a row for each number of requests."""
    rows = []
    try:
        for count in (1, 32):
            sides = [lambda core=core: step_microseconds(core, count, steps) for core in cores]  # noqa: B023
            inside, beside = alternate(rounds, *sides)
            added = statistics.median(b - a for a, b in zip(inside, beside, strict=True))
            rows.append(
                {
                    "worker": what,
                    "requests": count,
                    "inside µs": round(statistics.median(inside), 1),
                    "in a process µs": round(statistics.median(beside), 1),
                    "added µs": round(added, 1),
                    "limit µs": LIMIT_US,
                }
            )
    finally:
        for core in cores:
            core.shutdown()
    return rows


def main() -> None:
    """Measure each kind of worker in turn."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=500, help="steps of each round")
    arguments = options.parse_args()
    steps, rounds = arguments.steps, arguments.rounds
    # The workers' processes must find `instant_worker`, too.
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = compare(without_model(), "no model", steps, rounds)
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = "0.002"
    rows += compare(without_model(), "2 ms", steps // 2, rounds)
    rows += compare(with_model("random-tiny"), "random-tiny", steps, rounds)
    report("workers in processes of their own", rows, arguments.json)


if __name__ == "__main__":
    main()
