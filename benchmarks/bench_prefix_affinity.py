"""Measure what it is worth to send a prompt where its blocks are warm: two ranks of random-tiny on the CPU.

"conversations": several at once, each turn of which repeats all turns before it, with
`data_parallel_prefix_affinity` and without. "n=4": one long prompt after another, each with four completions,
which follow each other to one rank or are spread like different requests.

The hit rate is the share of prompt tokens that was found in the prefix cache; the engine's own counters say
so.

python benchmarks/bench_prefix_affinity.py [--json PATH] [--conversations 8] [--turns 8]
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

from common import parser, report

from nbengine import AsyncLLM, SamplingParams
from nbengine.sampling_params import RequestOutputKind

QUESTION, ANSWER = 96, 16
LONG_PROMPT = 1024
VOCABULARY = 256


def start(*, affinity: bool) -> AsyncLLM:
    """Start an engine of two ranks."""
    return AsyncLLM(
        "random-tiny",
        data_parallel_size=2,
        data_parallel_prefix_affinity=affinity,
        max_model_len=2048,
        num_gpu_blocks_override=2048,
    )


def question(chance: random.Random, length: int) -> list[int]:
    """Return random tokens."""
    return [chance.randrange(VOCABULARY) for _ in range(length)]


async def ask(llm: AsyncLLM, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
    """Return the answer, and the seconds to its first token."""
    begin, first, answer = time.perf_counter(), 0.0, []
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        first = first or time.perf_counter() - begin
        answer += output.outputs[0].token_ids
    return answer, first


async def converse(llm: AsyncLLM, seed: int, turns: int) -> list[float]:
    """Return the seconds to the first token of each turn but the first."""
    chance = random.Random(seed)
    params = SamplingParams(
        temperature=0, max_tokens=ANSWER, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    prompt: list[int] = []
    waits = []
    for _ in range(turns):
        prompt += question(chance, QUESTION)
        answer, first = await ask(llm, prompt, params)
        prompt += answer
        waits.append(first)
    return waits[1:]


async def converse_all(llm: AsyncLLM, seed: int, conversations: int, turns: int) -> list[float]:
    """Hold all conversations at once and return their waits."""
    found = await asyncio.gather(*(converse(llm, seed + number, turns) for number in range(conversations)))
    return [wait for waits in found for wait in waits]


async def complete_four(llm: AsyncLLM, seed: int, prompts: int) -> list[float]:
    """Return the seconds to all of four completions, one prompt after another."""
    chance = random.Random(seed)
    params = SamplingParams(
        n=4, seed=1, max_tokens=ANSWER, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    seconds = []
    for _ in range(prompts):
        _, wait = await ask(llm, question(chance, LONG_PROMPT), params)
        seconds.append(wait)
    return seconds


async def counters(llm: AsyncLLM) -> tuple[int, int]:
    """Return the numbers of prompt tokens found and looked up so far."""
    engines = (await llm.stats()).engines
    return sum(e.prefix_cache_hits for e in engines), sum(e.prefix_cache_queries for e in engines)


def row(what: str, waits: list[float], before: tuple[int, int], after: tuple[int, int]) -> dict[str, Any]:
    """Make one row of the table."""
    waits = sorted(waits)
    return {
        "requests": what,
        "hit rate": (after[0] - before[0]) / (after[1] - before[1]),
        "median ms": statistics.median(waits) * 1e3,
        "95th percentile ms": waits[int(len(waits) * 0.95)] * 1e3,
    }


async def measure_conversations(conversations: int, turns: int, rounds: int) -> list[dict[str, Any]]:
    """Measure conversations balanced by load alone, and with affinity."""
    rows = []
    for affinity in (False, True):
        llm = start(affinity=affinity)
        try:
            await converse_all(llm, 1_000_000, conversations, 2)
            before, waits = await counters(llm), []
            for number in range(rounds):
                waits += await converse_all(llm, 1000 * number, conversations, turns)
            name = "conversations, first token" + (", affinity" if affinity else "")
            rows.append(row(name, waits, before, await counters(llm)))
        finally:
            llm.shutdown()
    return rows


async def measure_siblings(rounds: int) -> list[dict[str, Any]]:
    """Measure four completions of one prompt, spread and together."""
    rows = []
    llm = start(affinity=False)
    router = llm.engine_core.cores.router
    try:
        await complete_four(llm, 0, 4)
        for together in (False, True):
            if together:
                del router._shares_prefix
            else:
                router._shares_prefix = lambda request: False
            before = await counters(llm)
            waits = await complete_four(llm, 1 + together, 10 * rounds)
            rows.append(
                row(
                    "n=4, all done, " + ("together" if together else "spread"),
                    waits,
                    before,
                    await counters(llm),
                )
            )
    finally:
        llm.shutdown()
    return rows


def main() -> None:
    """Measure conversations and siblings and report."""
    options = parser(__doc__)
    options.add_argument("--conversations", type=int, default=8)
    options.add_argument("--turns", type=int, default=8)
    arguments = options.parse_args()
    rows = asyncio.run(measure_conversations(arguments.conversations, arguments.turns, arguments.rounds))
    rows += asyncio.run(measure_siblings(arguments.rounds))
    report("prefix affinity, two ranks", rows, arguments.json)


if __name__ == "__main__":
    main()
