"""Time the hand-over of outputs to coroutines that wait for them: N requests, one token each a step.

    python benchmarks/bench_hand_over.py [--json PATH]

As with `AsyncLLM`, one thread processes the outputs and the readers are coroutines on another thread's event
loop, all of them waiting when a step comes. Timed are `process_outputs`, and the whole until the last reader
has its output.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from bench_output_processor import TEXT, WARMUP_STEPS, Streams
from common import parser, report

from nbengine.config import ModelConfig
from nbengine.frontend.outputs.output_collector import RequestOutputCollector
from nbengine.frontend.text.tokenizer import load_tokenizer
from nbengine.ipc.messages import EngineCoreOutput
from nbengine.models.checkpoints.files import resolve_model

T = TypeVar("T")
PAUSE_SECONDS = 0.001
"""The time between two steps, in which the readers begin to wait again."""


class Readers:
    """A coroutine for each collector, and an event that is set when all have read."""

    def __init__(self, collectors: list[RequestOutputCollector]) -> None:
        self._collectors = collectors
        self._num_read = 0
        self.all_read = threading.Event()

    async def read(self, collector: RequestOutputCollector) -> None:
        while True:
            await collector.get()
            self._num_read += 1
            if self._num_read == len(self._collectors):
                self._num_read = 0
                self.all_read.set()

    async def serve(self, produce: Callable[[], T]) -> T:
        """Read everything until `produce`, in its own thread, has returned; return what `produce`
        returned."""
        tasks = [asyncio.create_task(self.read(collector)) for collector in self._collectors]
        await asyncio.sleep(0)
        result = await asyncio.to_thread(produce)
        for task in tasks:
            task.cancel()
        return result


def produce(streams: Streams, readers: Readers, steps: int) -> list[tuple[float, float]]:
    """Return the microseconds of every step: processing alone, and until all have read."""
    times = []
    for index in range(steps):
        time.sleep(PAUSE_SECONDS)
        outputs = [EngineCoreOutput(request_id, [tokens[index]]) for request_id, tokens in streams.tokens]
        readers.all_read.clear()
        start = time.perf_counter()
        streams.processor.process_outputs(outputs)
        processed = time.perf_counter()
        if not readers.all_read.wait(10):
            raise SystemExit("an output was not read")
        times.append(((processed - start) * 1e6, (time.perf_counter() - start) * 1e6))
    return times


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    arguments.add_argument("--steps", type=int, default=200)
    arguments.set_defaults(rounds=3)
    options = arguments.parse_args()
    tokenizer = load_tokenizer(resolve_model(ModelConfig("smollm2-135m"))).backend_tokenizer
    ids = tokenizer.encode(TEXT.read_text() * 10).ids
    rows = []
    for requests in options.requests:
        times: list[tuple[float, float]] = []
        for _ in range(options.rounds):
            steps = WARMUP_STEPS + options.steps
            streams = Streams(tokenizer, ids, requests, steps, {})
            readers = Readers(streams.queues)
            measured = asyncio.run(readers.serve(functools.partial(produce, streams, readers, steps)))
            times += measured[WARMUP_STEPS:]
        processing, whole = zip(*times, strict=True)
        rows.append(
            {
                "requests": requests,
                "process_outputs_us": statistics.median(processing),
                "until_all_have_read_us": statistics.median(whole),
                "until_all_have_read_p90_us": statistics.quantiles(whole, n=10)[-1],
            }
        )
    report("hand_over", rows, options.json)


if __name__ == "__main__":
    main()
