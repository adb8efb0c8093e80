"""Measure the resident memory of every process over 2,000 requests of random length, a tenth of them aborted.

python benchmarks/bench_memory.py [--json PATH] [--requests 2000]
"""

from __future__ import annotations

import asyncio
import contextlib
import random

import psutil
from common import parser, report

from nbengine import AsyncLLM, SamplingParams

CONCURRENT = 32
SETTLED_AFTER = 500
ABORTED_SHARE = 0.1


def resident(engine: AsyncLLM) -> dict[str, int]:
    """Return the bytes of each process: this frontend, the host, the engine cores."""
    host = psutil.Process(engine.connection.host_pid)
    named = {"frontend": psutil.Process(), "host": host}
    named |= {f"engine core {i}": child for i, child in enumerate(host.children(recursive=True))}
    return {name: process.memory_info().rss for name, process in named.items()}


async def one_request(engine: AsyncLLM, chooser: random.Random) -> None:
    """Send a request of random length that is sometimes given up half-way."""
    vocabulary = range(10, 200)
    prompt = {"prompt_token_ids": chooser.choices(vocabulary, k=chooser.randrange(1, 400))}
    wanted = chooser.randrange(1, 100)
    give_up_after = chooser.randrange(1, wanted + 1) if chooser.random() < ABORTED_SHARE else wanted + 1
    params = SamplingParams(temperature=1, max_tokens=wanted, ignore_eos=True)
    seen = 0
    async with contextlib.aclosing(engine.generate(prompt, params)) as stream:
        async for _ in stream:
            seen += 1
            if seen >= give_up_after:
                return


async def load(engine: AsyncLLM, requests: int) -> list[dict[str, int]]:
    """Run the requests, `CONCURRENT` at a time, and sample the memory every 250."""
    chooser = random.Random(0)
    samples = []
    for done in range(0, requests, 250):
        slots = asyncio.Semaphore(CONCURRENT)

        async def limited(slots: asyncio.Semaphore = slots) -> None:
            async with slots:
                await one_request(engine, chooser)

        await asyncio.gather(*(limited() for _ in range(min(250, requests - done))))
        samples.append({"requests": min(done + 250, requests), **resident(engine)})
    return samples


def main() -> None:
    """Print the samples and each process's growth after the first 500 requests."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=2000)
    options.add_argument("--model", default="random-tiny")
    arguments = options.parse_args()
    engine = AsyncLLM(arguments.model, num_gpu_blocks_override=2000, max_num_seqs=CONCURRENT)
    try:
        samples = asyncio.run(load(engine, arguments.requests))
    finally:
        engine.shutdown()
    processes = [name for name in samples[0] if name != "requests"]
    settled = next(s for s in samples if s["requests"] >= min(SETTLED_AFTER, arguments.requests))
    rows = [
        {name: s[name] if name == "requests" else f"{s[name] / 2**20:.1f} MiB" for name in s} for s in samples
    ]
    growth: dict[str, object] = {"requests": f"growth after {settled['requests']}"}
    growth |= {name: f"{samples[-1][name] / settled[name] - 1:+.2%}" for name in processes}
    report("resident memory", [*rows, growth], arguments.json)


if __name__ == "__main__":
    main()
