"""A client on another machine: does what its standard input says, and tells what comes of it, a JSON object a line.

    generate NAME FIRST COUNT    stream COUNT tokens: {"name", "tokens"} a piece, then {"name", "end"}
    stats                        {"stats": steps} from the published statistics, once there have been some
    memory                       {"tensors": whether large tensors go through shared memory}

Whatever raises is told as {"name", "error", "message"}.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from nbengine import AsyncLLM, SamplingParams
from nbengine.client.observe.stats_subscriber import StatsSubscriber
from nbengine.metrics.stats import EngineStats
from nbengine.sampling_params import RequestOutputKind


def tell(**message: Any) -> None:
    print(json.dumps(message), flush=True)


async def generate(llm: AsyncLLM, name: str, first: str, count: str) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=int(count), ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    try:
        async for output in llm.generate({"prompt_token_ids": [int(first)]}, params):
            tell(name=name, tokens=output.outputs[0].token_ids)
    except Exception as error:  # noqa: BLE001
        tell(name=name, error=type(error).__name__, message=str(error))
    else:
        tell(name=name, end=True)


def read_stats(llm: AsyncLLM) -> None:
    with StatsSubscriber(llm.connection) as subscriber:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            message = subscriber.poll(1.0)
            if isinstance(message, EngineStats) and message.engines[0].step_counter:
                tell(stats=message.engines[0].step_counter)
                return
    tell(stats=None)


async def main(file: str) -> None:
    try:
        llm = await asyncio.to_thread(AsyncLLM.attach, file)
    except Exception as error:  # noqa: BLE001
        tell(name="attach", error=type(error).__name__, message=str(error))
        return
    tell(name="attach", end=True)
    tasks = []
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, *arguments = line.split()
        if command == "generate":
            tasks.append(asyncio.create_task(generate(llm, *arguments)))
        elif command == "stats":
            await asyncio.to_thread(read_stats, llm)
        else:
            tell(tensors=llm.engine_core._tensors is not None)
    for task in tasks:
        task.cancel()
    llm.detach()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
