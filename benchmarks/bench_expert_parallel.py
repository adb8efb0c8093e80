"""Measure what it costs engine cores to compute experts together: the exchange of rows, and throughput.

    python benchmarks/bench_expert_parallel.py [--rounds N] [--json PATH]

The first table is the exchange of one layer, a gathering of all tokens and a reduce-scatter of the results,
between two engine cores with as many tokens each: through gloo, and through shared memory. Both ways
alternate in the same processes, each on one thread. A figure is microseconds a layer on engine core 0, median
of the rounds; the ratio is the median of the ratios of neighbouring rounds, theirs by ours. `idle` is the
same when the second engine core has no tokens.

The second table is random-tiny-moe with 64 requests of 32 prompt tokens and 64 new ones: tokens a second of
one engine core, of two without and with expert parallelism. The model is so small that what is seen is the
cost of the lock step.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from common import alternate, median_ratio, parser, report
from torch.distributed import FileStore  # type: ignore[attr-defined]

from nbengine import LLM, SamplingParams
from nbengine.distributed.communicator import DataParallelGroup
from nbengine.distributed.data_parallel import join_data_parallel
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.torch_data_parallel import TorchDataParallelGroup
from tests.tools.scratch import shared_memory_prefix

CPU = torch.device("cpu")
CORES = 2
TOKENS = (1, 4, 16, 64)
HIDDEN = (64, 512, 2048)
ROUND_SECONDS = 0.05
NUM_REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 64, 32, 64
ENGINES: dict[str, dict[str, Any]] = {
    "one engine core": {},
    "two": {"data_parallel_size": 2},
    "two, expert parallel": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


def layer(group: DataParallelGroup, tokens: int, hidden: int) -> Callable[[], float]:
    """Make a round: it returns microseconds a layer, over as many layers as the slower engine core makes in
    ROUND_SECONDS."""
    mine = torch.zeros(tokens, hidden)

    def run(count: int) -> float:
        group.begin_step(tokens)
        start = time.perf_counter()
        for _ in range(count):
            group.reduce_scatter(group.gather(mine))
        return (time.perf_counter() - start) / count

    slowest = torch.tensor([run(3)])
    group.broadcast(slowest, 0)
    count = max(3, min(2000, int(ROUND_SECONDS / float(slowest))))
    return lambda: run(count) * 1e6


def run_core(rank: int, rounds: int, directory: str) -> None:
    """Run one engine core in this process; rank 0 prints the rows."""
    torch.set_num_threads(1)
    memory = join_data_parallel(
        RankLayout(dp_rank=rank, dp_size=CORES),
        CPU,
        init_method=f"file://{directory}/memory",
        engine="bench",
        directory=directory,
        max_tensor_bytes=max(TOKENS) * max(HIDDEN) * 4,
        dtype=torch.float32,
    )
    store = FileStore(f"{directory}/gloo", CORES)
    gloo = TorchDataParallelGroup(store, rank, CORES, CPU, "127.0.0.1", timedelta(seconds=60))
    with contextlib.closing(memory), contextlib.closing(gloo):
        for hidden in HIDDEN:
            for tokens in TOKENS:
                for idle in (False, True):
                    own = 0 if idle and rank else tokens
                    theirs, ours = alternate(rounds, layer(gloo, own, hidden), layer(memory, own, hidden))
                    if rank == 0:
                        print(json.dumps(row(tokens, hidden, idle, theirs, ours)), flush=True)
        memory.any(False)


def row(tokens: int, hidden: int, idle: bool, gloo: list[float], memory: list[float]) -> dict[str, Any]:
    """Make the row of one size."""
    return {
        "what": f"[{tokens}, {hidden}] each" if not idle else f"[{tokens}, {hidden}], idle",
        "gloo µs": statistics.median(gloo),
        "shared memory µs": statistics.median(memory),
        "ratio": median_ratio(gloo, memory),
    }


def measure_exchange(rounds: int) -> list[dict[str, Any]]:
    """Run both processes and return what engine core 0 has measured."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix=shared_memory_prefix(), dir=place) as directory:
        command = [sys.executable, __file__, "--core"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(rounds), directory], stdout=subprocess.PIPE if rank == 0 else None
            )
            for rank in range(CORES)
        ]
        output, _ = processes[0].communicate()
        if any(process.wait() for process in processes):
            sys.exit("an engine core has failed")
    return [json.loads(line) for line in output.splitlines()]


def measure_engines(rounds: int) -> list[dict[str, Any]]:
    """Measure the tokens a second of each engine, all of them running side by side and taking turns."""
    prompts = [{"prompt_token_ids": [number + 1] * PROMPT_TOKENS} for number in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(LLM("random-tiny-moe", dtype="float32", max_model_len=256, **options))
            for options in ENGINES.values()
        ]

        def rate(llm: LLM) -> float:
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return NUM_REQUESTS * NEW_TOKENS / (time.perf_counter() - start)

        figures = alternate(rounds, *(lambda llm=llm: rate(llm) for llm in engines))
    return [
        {"engine": name, "tokens/s": statistics.median(own), "of one core's": median_ratio(own, figures[0])}
        for name, own in zip(ENGINES, figures, strict=True)
    ]


def main() -> None:
    """Measure both tables and report."""
    if sys.argv[1:2] == ["--core"]:
        rank, rounds, directory = sys.argv[2:]
        run_core(int(rank), int(rounds), directory)
        return
    options = parser(__doc__).parse_args()
    exchange = measure_exchange(options.rounds)
    report("Rows between two engine cores, a layer", exchange, None)
    engines = measure_engines(options.rounds)
    report("Engine cores in lock step", engines, options.json, exchange=exchange)


if __name__ == "__main__":
    main()
