"""Measure what a step costs around the model, from AsyncLLM to the scheduler, with a model that only waits.

    python benchmarks/bench_host_cost.py [--json PATH] [--streams N ...] [--step-us US ...] [--model NAME]

Every stream has its own prompt of 128 tokens and gets 200 tokens of a real text, as deltas. The interval of a
step is the time between a stream's first and last output, a token (the median over streams and rounds); what
is above the model's time is the host cost that was not overlapped. A model of 0 µs leaves nothing to overlap
with: the interval is the slowest stage. The last columns are processor time a token, of this process and of the
engine's, which differ less between runs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import parser, report

from nbengine import AsyncLLM, RequestOutputKind, SamplingParams

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """The times of one stream as its reader saw it, in seconds."""

    tokens: int
    outputs: int
    first: float
    last: float


class Load:
    """A load of streams with prompts that share no block."""

    def __init__(self, llm: AsyncLLM, ids: list[int], tokens: int) -> None:
        self._llm = llm
        self._ids = ids
        self._params = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._serial = itertools.count(1)

    async def run(self, streams: int) -> list[StreamTimes]:
        """Run `streams` streams at once."""
        return await asyncio.gather(*[self._stream(self._prompt()) for _ in range(streams)])

    def _prompt(self) -> list[int]:
        number = next(self._serial)
        begin = number * 131 % (len(self._ids) - PROMPT_TOKENS)
        return [3 + number % 40_000, *self._ids[begin : begin + PROMPT_TOKENS - 1]]

    async def _stream(self, prompt: list[int]) -> StreamTimes:
        start = time.perf_counter()
        first = 0.0
        tokens = outputs = 0
        async for output in self._llm.generate({"prompt_token_ids": prompt}, self._params):
            first = first or time.perf_counter() - start
            tokens += len(output.outputs[0].token_ids)
            outputs += 1
        return StreamTimes(tokens, outputs, first, time.perf_counter() - start)


def processor_seconds() -> tuple[float, float]:
    """Return the processor time of this process, and that of its engine's processes."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    client, *engine = [time.user + time.system for time in times]
    return client, sum(engine)


async def measure(load: Load, streams: int, rounds: int, step_us: float) -> dict[str, Any]:
    """Measure one row."""
    rates: list[float] = []
    times: list[StreamTimes] = []
    before = processor_seconds()
    for _ in range(rounds):
        start = time.perf_counter()
        # One stream without others is over so soon that it takes several to make a round.
        this_round = [await load.run(streams) for _ in range(5 if streams == 1 else 1)]
        elapsed = time.perf_counter() - start
        flat = list(itertools.chain.from_iterable(this_round))
        rates.append(sum(stream.tokens for stream in flat) / elapsed)
        times += flat
    used = [end - begin for begin, end in zip(before, processor_seconds(), strict=True)]
    tokens = sum(stream.tokens for stream in times)
    interval = statistics.median((t.last - t.first) / (t.tokens - 1) for t in times) * 1e6
    return {
        "streams": streams,
        "model_us": step_us,
        "interval_us": round(interval, 1),
        "host_us": round(interval - step_us, 1),
        "tokens_per_s": round(statistics.median(rates)),
        "ttft_ms": round(statistics.median(t.first for t in times) * 1e3, 2),
        "outputs_per_token": round(statistics.median(t.outputs / t.tokens for t in times), 3),
        "client_cpu_us": round(used[0] / tokens * 1e6, 1),
        "engine_cpu_us": round(used[1] / tokens * 1e6, 1),
    }


def measure_step(step_us: float, arguments: Any) -> list[dict[str, Any]]:
    """Measure the rows of one engine, whose model takes `step_us`."""
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "text.json"
        os.environ["NBENGINE_BENCH_STEP_SECONDS"] = str(step_us / 1e6)
        os.environ["NBENGINE_BENCH_TEXT"] = str(text)
        tokenizer_ids = text_ids(arguments.model)
        text.write_text(json.dumps(tokenizer_ids))
        llm = AsyncLLM(
            arguments.model,
            max_model_len=8192,
            max_num_batched_tokens=8192,
            async_scheduling=arguments.async_scheduling,
            distributed_executor_backend="fake_executor:SerialDeviceExecutor",
        )
        load = Load(llm, tokenizer_ids, arguments.tokens)

        async def rows() -> list[dict[str, Any]]:
            await load.run(16)
            return [await measure(load, streams, arguments.rounds, step_us) for streams in arguments.streams]

        try:
            return asyncio.run(rows())
        finally:
            llm.shutdown()


def text_ids(model: str) -> list[int]:
    """Return the token ids of the architecture's description, several times over."""
    from nbengine.config import ModelConfig
    from nbengine.frontend.text.tokenizer import load_tokenizer
    from nbengine.models.checkpoints.files import resolve_model

    tokenizer = load_tokenizer(resolve_model(ModelConfig(model))).backend_tokenizer
    return tokenizer.encode(TEXT.read_text() * 10).ids


def main() -> None:
    """Measure each model time in its own engine."""
    options = parser(__doc__)
    options.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    options.add_argument(
        "--step-us", type=float, nargs="+", default=[0, 2000], help="microseconds of a step of the model"
    )
    options.add_argument("--model", default="smollm2-135m", help="the model whose tokenizer is used")
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction, default=None)
    arguments = options.parse_args()
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    rows = [row for step_us in arguments.step_us for row in measure_step(step_us, arguments)]
    report("host cost of a step through AsyncLLM", rows, arguments.json)


if __name__ == "__main__":
    main()
