"""Measure how long ranks on one machine take to exchange tensors: through gloo, and through shared memory.

    python benchmarks/bench_all_reduce.py [--ranks 2,3,4] [--json PATH]

The tensors are those of SmolLM2-135M: hidden states of 576, logits of 49152 in all. Every rank is a process
on one thread. Both ways alternate in the same processes. A figure is the time that a call takes rank 0 among
calls one after another, in microseconds, median of the rounds; the ratio is the median of the ratios of
neighbouring rounds, theirs by ours.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import alternate, median_ratio, parser, report

from nbengine.distributed.communicator import Communicator, ParallelState, PipelineLink
from nbengine.distributed.init import START_SECONDS, TorchWorld, init_parallel
from nbengine.distributed.layout import RankLayout
from nbengine.distributed.rendezvous import Party, Rendezvous
from nbengine.distributed.torch_communicator import TorchCommunicator, TorchLink
from tests.tools.scratch import shared_memory_prefix

CPU = torch.device("cpu")
HIDDEN, VOCABULARY, MAX_ROWS = 576, 49152, 2048
ROWS = {"decode 1": 1, "decode 32": 32, "prefill 256": 256, "prefill 2048": MAX_ROWS}
DTYPES = (torch.float32, torch.bfloat16)
ROUND_SECONDS = 0.05

Call = Callable[[], object]


def repeat(call: Call, group: Communicator) -> Callable[[], float]:
    """Make a round: it returns microseconds a call, over as many calls as the slowest rank makes in
    ROUND_SECONDS."""

    def run(count: int) -> float:
        group.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count

    slowest = float(group.all_gather(torch.tensor([run(3)])).max())
    count = max(3, min(2000, int(ROUND_SECONDS / slowest)))
    return lambda: run(count) * 1e6


def cases(state: ParallelState, group: TorchCommunicator) -> Iterator[tuple[str, Call, Call]]:
    """Yield the cases to measure: each has a name, a call through gloo and a call through shared memory."""
    gloo, ours, size = group, state.tp, state.layout.tp_size
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        for rows_name, rows in ROWS.items():
            x = torch.zeros(rows, HIDDEN, dtype=dtype)
            if size > 1:
                what = f"all_reduce, {rows_name}, [{rows}, {HIDDEN}] {name}"
                yield what, lambda x=x: gloo.all_reduce(x), lambda x=x: ours.all_reduce(x)
            else:
                what = f"stage to stage, {rows_name}, [{rows}, {HIDDEN}] {name}"
                yield (
                    what,
                    passing(state, x, over_gloo(state)),
                    passing(state, x, (state.previous, state.next)),
                )
    if size > 1:
        logits = torch.zeros(32, VOCABULARY // size)
        what = f"all_gather, logits of 32, [32, {VOCABULARY // size}] float32"
        yield what, lambda: gloo.all_gather(logits), lambda: ours.all_gather(logits)


def over_gloo(state: ParallelState) -> tuple[PipelineLink | None, PipelineLink | None]:
    """Make the links of a world of two stages, through gloo."""
    link = TorchLink(1 - state.layout.rank, CPU)
    return (None, link) if state.previous is None else (link, None)


def passing(
    state: ParallelState, x: torch.Tensor, links: tuple[PipelineLink | None, PipelineLink | None]
) -> Call:
    """Make a call that passes a tensor from the first stage to the second."""
    before, after = links

    def call() -> None:
        if before is not None:
            before.receive(x.shape, x.dtype)
        if after is not None:
            after.send(x)

    return call


def run_rank(rank: int, tp: int, pp: int, rounds: int, directory: str) -> None:
    """Run one rank in this process; rank 0 prints the rows."""
    torch.set_num_threads(1)
    layout = RankLayout(rank % tp, tp, rank // tp, pp)
    state = init_parallel(
        layout,
        CPU,
        init_method=f"file://{directory}/rendezvous",
        directory=directory,
        max_tensor_bytes=MAX_ROWS * HIDDEN * 4,
    )
    meeting = Rendezvous(f"file://{directory}/gloo", Party.of_workers(layout), "gloo", START_SECONDS)
    with contextlib.closing(state), contextlib.closing(TorchWorld(layout, CPU, meeting)) as world:
        group = TorchCommunicator(world.stage_group() if tp > 1 else torch.distributed.group.WORLD, CPU)
        for name, theirs, ours in cases(state, group):
            gloo, memory = alternate(rounds, repeat(theirs, group), repeat(ours, group))
            if rank == 0:
                row = {"ranks": tp * pp, "what": name, "gloo µs": statistics.median(gloo)}
                row |= {"shared memory µs": statistics.median(memory), "ratio": median_ratio(gloo, memory)}
                print(json.dumps(row), flush=True)
        group.barrier()


def run_world(tp: int, pp: int, rounds: int) -> list[dict[str, Any]]:
    """Run all processes of a world and return what rank 0 has measured."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix=shared_memory_prefix(), dir=place) as directory:
        numbers = [str(number) for number in (tp, pp, rounds)]
        command = [sys.executable, __file__, "--rank"]
        processes = [
            subprocess.Popen(
                [*command, str(rank), *numbers, directory], stdout=subprocess.PIPE if rank == 0 else None
            )
            for rank in range(tp * pp)
        ]
        output, _ = processes[0].communicate()
        if any(process.wait() for process in processes):
            sys.exit("a rank has failed")
    return [json.loads(line) for line in output.splitlines()]


def main() -> None:
    """Measure each size of group and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", default="2,3,4", help="sizes of the groups")
    options = arguments.parse_args()
    rows = [row for size in options.ranks.split(",") for row in run_world(int(size), 1, options.rounds)]
    rows += run_world(1, 2, options.rounds)
    report("Tensors between ranks: gloo and shared memory", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(*map(int, sys.argv[2:6]), sys.argv[6])
    else:
        main()
