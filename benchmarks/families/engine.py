"""Ask a fresh engine of the nbengine that is imported: one stream, eight, and a long prompt; print JSON.

    python benchmarks/families/engine.py MODEL KIND TOKENS

It uses nothing but what every version of nbengine has, so that another checkout can be put before this one.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from typing import Any

from nbengine import AsyncLLM, SamplingParams

PROMPT, LONG_PROMPT, STREAMS, ANSWERS = 64, 512, 8, 3


async def stream(llm: AsyncLLM, length: int, tokens: int) -> tuple[float, float, float]:
    """Return when a request began, when its first token came, and when its last."""
    prompt = [random.randrange(3, 96) for _ in range(length)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begun, first = time.perf_counter(), 0.0
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        if output.outputs[0].token_ids and not first:
            first = time.perf_counter()
    return begun, first, time.perf_counter()


async def together(llm: AsyncLLM, streams: int, tokens: int) -> float:
    """Return the milliseconds of a step of all streams, once all of them decode."""
    times = await asyncio.gather(*(stream(llm, PROMPT, tokens) for _ in range(streams)))
    return (max(last for *_, last in times) - max(first for _, first, _ in times)) / (tokens - 1) * 1e3


async def measure(llm: AsyncLLM, tokens: int) -> dict[str, float]:
    """Return the medians of some answers each, behind one that is not counted."""
    await stream(llm, PROMPT, 8)
    await stream(llm, LONG_PROMPT, 1)
    one = [await together(llm, 1, tokens) for _ in range(ANSWERS)]
    several = [await together(llm, STREAMS, max(2, tokens // 2)) for _ in range(ANSWERS)]
    prompts = [await stream(llm, LONG_PROMPT, 1) for _ in range(ANSWERS)]
    rate = [LONG_PROMPT / (first - begun) for begun, first, _ in prompts]
    return {
        "one": statistics.median(one),
        "several": statistics.median(several),
        "prompt": statistics.median(rate),
    }


def main() -> None:
    """Start an engine, ask it and print what was found."""
    model, kind, tokens = sys.argv[1:]
    rounding: dict[str, Any] = {"quantization": kind} if kind.startswith("int") else {"dtype": kind}
    random.seed(0)
    llm = AsyncLLM(model, max_model_len=1024, enable_prefix_caching=False, **rounding)
    try:
        print(json.dumps(asyncio.run(measure(llm, int(tokens)))))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    main()
