"""Measure what async scheduling gains: an engine core with and without it, in turn, in this process.

    python benchmarks/bench_async_scheduling.py [--json PATH] [--model NAME]

Milliseconds a decoding step of N greedy requests, from the outputs of one step to those of the next. "model":
the model on this machine's device. "2 ms": a device that computes for 2 ms beside the processor, as a GPU
does; what is above 2 ms is what the engine adds.
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from functools import partial
from typing import Any

from common import alternate, median_ratio, parser, report
from fake_executor import FixedRateExecutor

from nbengine.config import EngineArgs, EngineConfig
from nbengine.engine.core.core import EngineCore
from nbengine.executor.base import Executor
from nbengine.executor.uniproc import UniProcExecutor
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.models.checkpoints.files import resolve_model
from nbengine.sampling_params import SamplingParams

PROMPT_TOKENS = 32
STEP_SECONDS = "0.002"
WARMUP_STEPS = 8


class DeviceExecutor(FixedRateExecutor):
    """An executor whose step begins when it has been handed over and the step before has ended."""

    def _next_end(self, now: float) -> float:
        return max(self._end, now) + self._step_seconds


def make_core(config: EngineConfig, executor: type[Executor], *, is_async: bool) -> EngineCore:
    scheduler = replace(config.scheduler, async_scheduling=is_async)
    return EngineCore(replace(config, scheduler=scheduler), executor)


def step_milliseconds(core: EngineCore, num_requests: int, steps: int) -> float:
    """Return the mean time between the outputs of two decoding steps."""
    params = SamplingParams(temperature=0, max_tokens=steps + WARMUP_STEPS + 1, ignore_eos=True)
    for number in range(num_requests):
        prompt = [(7 * number + 3 * i) % 200 + 10 for i in range(PROMPT_TOKENS)]
        request = EngineCoreRequest(f"r{number}", prompt, params)
        core.add_request(*core.preprocess_add_request(request))
    gc.collect()
    outputs_seen, start, end = 0, 0.0, 0.0
    while core.has_work():
        outputs, executed = core.step_fn()
        core.post_step(executed)
        if outputs:
            outputs_seen += 1
            end = time.perf_counter()
            if outputs_seen == WARMUP_STEPS:
                start = end
    return 1e3 * (end - start) / (outputs_seen - WARMUP_STEPS)


def main() -> None:
    """Measure each case and report one row for it."""
    options = parser(__doc__)
    options.add_argument("--model", default="smollm2-135m")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--requests", type=int, nargs="+", default=[1, 16])
    arguments = options.parse_args()
    config = EngineArgs(arguments.model, num_gpu_blocks_override=512, max_model_len=512).create_engine_config(
        bound=True
    )
    config = replace(config, model=resolve_model(config.model))
    cases: list[tuple[str, type[Executor]]] = [("model", UniProcExecutor), ("2 ms", DeviceExecutor)]
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = STEP_SECONDS
    rows: list[dict[str, Any]] = []
    for name, executor in cases:
        cores = [make_core(config, executor, is_async=is_async) for is_async in (False, True)]
        for count in arguments.requests:
            sides = [partial(step_milliseconds, core, count, arguments.steps) for core in cores]
            synchronous, ahead = alternate(arguments.rounds, *sides)
            rows.append(
                {
                    "ms a step": f"{name}, {count} requests",
                    "sync": round(min(synchronous), 3),
                    "async": round(min(ahead), 3),
                    "async / sync": round(median_ratio(ahead, synchronous), 3),
                }
            )
        for core in cores:
            core.shutdown()
    report("async scheduling", rows, arguments.json)


if __name__ == "__main__":
    main()
