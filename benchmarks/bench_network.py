"""Measure what a network transport costs beside files of one machine: TCP with CURVE (loopback) against ipc.

The same engine (a model that ends a step every 2 ms) runs twice, and the same client uses each in turn: the
figures are the time of an empty call to the engine core and back, tokens a second of 64 streams, and the
processor time that a token takes of the client and of the engine. There is no peer: no other engine encrypts
these connections.

python benchmarks/bench_network.py [--json PATH] [--tokens 200]
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import parser, report

from nbengine import AsyncLLM, SamplingParams
from nbengine.client.engines.processes import session_processes
from nbengine.sampling_params import RequestOutputKind

os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
)
os.environ["NBENGINE_BENCH_STEP_SECONDS"] = "0.002"
STREAMS = 64
CALLS = 500


@dataclass(frozen=True)
class Figures:
    """The figures of one round."""

    call_us: float
    tokens_per_second: float
    client_us: float
    engine_us: float


def start(address: str | None) -> AsyncLLM:
    """Start an engine that listens on `address`, or in its run directory."""
    return AsyncLLM(
        model="random-tiny",
        distributed_executor_backend="fake_executor:FixedRateExecutor",
        num_gpu_blocks_override=4096,
        data_parallel_address=address,
    )


def engine_cpu_seconds(llm: AsyncLLM) -> float:
    """Return the processor time of all the engine's processes."""
    times = [process.cpu_times() for process in session_processes(llm.connection)]
    return sum(item.user + item.system for item in times)


async def stream(llm: AsyncLLM, tokens: int) -> None:
    """Send one request and read it to its end."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    async for _ in llm.generate({"prompt_token_ids": [1, 2, 3]}, params):
        pass


async def measure(llm: AsyncLLM, tokens: int) -> Figures:
    """Measure one round."""
    waits = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        await llm.call_utility("ping")
        waits.append(time.perf_counter() - begun)
    own = psutil.Process()
    before, engine_before = own.cpu_times(), engine_cpu_seconds(llm)
    begun = time.perf_counter()
    await asyncio.gather(*(stream(llm, tokens) for _ in range(STREAMS)))
    seconds = time.perf_counter() - begun
    after, engine_after = own.cpu_times(), engine_cpu_seconds(llm)
    total = STREAMS * tokens
    client = after.user + after.system - before.user - before.system
    return Figures(
        statistics.median(waits) * 1e6,
        total / seconds,
        client / total * 1e6,
        (engine_after - engine_before) / total * 1e6,
    )


async def run(rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Measure the rows, after a warm-up round of each side."""
    sides = {"ipc": start(None), "TCP + CURVE": start("127.0.0.1")}
    figures: dict[str, list[Figures]] = {name: [] for name in sides}
    try:
        for index in range(rounds + 1):
            for name, llm in sides.items():
                measured = await measure(llm, tokens)
                if index:
                    figures[name].append(measured)
    finally:
        for llm in sides.values():
            llm.shutdown()
    return [
        {
            "transport": name,
            "call and answer, median µs": statistics.median(item.call_us for item in items),
            "tokens/s, 64 streams": statistics.median(item.tokens_per_second for item in items),
            "client CPU µs/token": statistics.median(item.client_us for item in items),
            "engine CPU µs/token": statistics.median(item.engine_us for item in items),
        }
        for name, items in figures.items()
    ]


def main() -> None:
    """Measure both transports and report."""
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=200)
    arguments = options.parse_args()
    rows = asyncio.run(run(arguments.rounds, arguments.tokens))
    report("a network transport beside files of one machine", rows, arguments.json)


if __name__ == "__main__":
    main()
