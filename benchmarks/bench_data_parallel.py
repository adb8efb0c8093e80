"""Measure the throughput of several independent engine cores against one, with a model of 2 ms a step.

All requests are sent at once; one in five is five times as long as the others. The cores' steps take no CPU,
but what is around them does: with n ranks, n engine cores and one client share this machine.

"busiest / mean" is the outstanding work (tokens still to come) of the rank that has most of it, as a multiple
of the mean, sampled every 10 ms while no rank has run dry: its median, and the 95th percentile.

python benchmarks/bench_data_parallel.py [--json PATH] [--ranks 1,2,4] [--requests 512]
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from common import parser, report

from nbengine import LLM, SamplingParams

STEP_SECONDS = 0.002
SHORT, LONG = 30, 150
PLACES = 16


def start(size: int) -> LLM:
    """Start an engine of `size` ranks."""
    return LLM(
        "random-tiny",
        data_parallel_size=size,
        max_num_seqs=PLACES,
        max_model_len=1024,
        num_gpu_blocks_override=4096,
        distributed_executor_backend="fake_executor:SerialDeviceExecutor",
    )


class Sampler(threading.Thread):
    """A thread that looks at the outstanding work of each rank until `stop`."""

    def __init__(self, llm: LLM, lengths: dict[str, int], size: int) -> None:
        super().__init__(daemon=True)
        self._engine = llm.llm_engine
        self._lengths = lengths
        self._size = size
        self._done = threading.Event()
        self.ratios: list[float] = []

    def run(self) -> None:
        """Take a sample every 10 ms."""
        while not self._done.wait(0.01):
            left = self._look()
            if min(left) > 0:
                self.ratios.append(max(left) * self._size / sum(left))

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._done.set()
        self.join()

    def _look(self) -> list[int]:
        left = [0] * self._size
        states = self._engine.output_processor.request_states
        for name, entry in list(self._engine.engine_core.cores.router._in_flight.items()):  # type: ignore[attr-defined]
            state = states.get(name)
            if state is not None:
                length = self._lengths[state.external_req_id]
                left[entry.home.rank] += length - len(state.detokenizer.token_ids)
        return left


def run(llm: LLM, size: int, count: int, seed: int) -> tuple[float, list[float]]:
    """Return the tokens a second, and the samples."""
    chance = random.Random(seed)
    lengths = [LONG if chance.random() < 0.2 else SHORT for _ in range(count)]
    first = next(llm._request_counter) + 1
    sampler = Sampler(llm, {str(first + i): length for i, length in enumerate(lengths)}, size)
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in lengths]
    sampler.start()
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": [1, 2, 3, i % 256]} for i in range(count)], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    sampler.stop()
    return sum(lengths) / seconds, sampler.ratios


def main() -> None:
    """Measure each number of ranks, one engine at a time."""
    options = parser(__doc__)
    options.add_argument("--ranks", default="1,2,4")
    options.add_argument("--requests", type=int, default=512)
    arguments = options.parse_args()
    os.environ["NBENGINE_BENCH_STEP_SECONDS"] = str(STEP_SECONDS)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    )
    rows: list[dict[str, Any]] = []
    for size in map(int, arguments.ranks.split(",")):
        with start(size) as llm:
            run(llm, size, 64, 0)
            results = [run(llm, size, arguments.requests, seed) for seed in range(arguments.rounds)]
        rate = statistics.median(rate for rate, _ in results)
        ratios = sorted(ratio for _, samples in results for ratio in samples)
        rows.append(
            {
                "ranks": size,
                "tokens/s": rate,
                "of one rank": rate / (rows[0]["tokens/s"] if rows else rate),
                "busiest / mean, median": statistics.median(ratios),
                "95th percentile": ratios[int(len(ratios) * 0.95)],
            }
        )
    report("throughput of independent ranks, 2 ms a step", rows, arguments.json)


if __name__ == "__main__":
    main()
