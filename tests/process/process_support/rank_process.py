"""A worker's place without a worker: joins a world when told to, and makes the calls that a seed gives.

Commands are lines of JSON on stdin, each answered by one on stdout. One process joins many worlds, one after another: torch
takes seconds to import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nbengine.distributed import data_parallel, init
from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.data_parallel import DataParallelEnd, join_data_parallel
from nbengine.distributed.layout import RankLayout
from nbengine.kernels.dispatch import shares_memory
from nbengine.worker.batch.allocation import Allocations

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 5, 64, 576, 1000)
ROWS = (1, 2, 3, 32, 700)
MAX_TENSOR_BYTES = max(ROWS) * max(WIDTHS) * 4


def data(seed: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make the random data that `seed` stands for, the same in every process."""
    number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=6).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (values * 10.0 ** (number % 7 - 3)).to(dtype)


class Script:
    """Random calls: which, comes from the seed alone and is the same on all ranks; when, differs from rank to rank.

    How many rows an engine core has in a step comes from the seed, too: every rank knows what it must get.
    """

    def __init__(self, state: ParallelState, seed: int, exact: bool) -> None:
        self._state = state
        self._seed = seed
        self._exact = exact
        self._plan = random.Random(seed)
        layout = state.layout
        self._delays = random.Random(seed * 1000 + layout.rank + 100 * layout.dp_rank)
        self._kinds = ["all_reduce", "all_reduce", "all_gather", "barrier", "stages", "attempt"]
        if layout.dp_size > 1:
            self._kinds += ["step", "step", "step", "flags", "broadcast"]
        self._digest = hashlib.blake2b()

    def run(self, num_calls: int) -> str:
        """Make the calls, compare each result with the reference; the digest of what the ranks of a stage must share."""
        for index in range(num_calls):
            if self._delays.random() < 0.05:
                time.sleep(self._delays.random() * 0.02)
            name = self._plan.choice(self._kinds)
            shape = (self._plan.choice(ROWS), self._plan.choice(WIDTHS))
            dtype = self._plan.choice(DTYPES)
            getattr(self, name)(index, shape, dtype)
        return self._digest.hexdigest()

    def all_reduce(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        mine, parts = self._parts(index, shape, dtype)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        self._compare(self._state.tp.all_reduce(mine), total.to(dtype), parts)

    def all_gather(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        mine, parts = self._parts(index, shape, dtype)
        gathered = self._state.tp.all_gather(mine)
        if not torch.equal(gathered, torch.cat(parts, dim=-1)):
            raise AssertionError(f"all_gather {index} of {shape} {dtype} is wrong")
        self._add(gathered)

    def barrier(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._state.tp.barrier()

    def attempt(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """One rank or none runs out of memory, before an exchange or after it; the next call finds all ranks alike."""
        tp = self._state.tp
        poor, place = self._plan.randrange(2 * tp.size), self._plan.choice(("before", "after"))
        mine, parts = self._parts(index, shape, dtype)
        gathered = None
        with Allocations(tp).attempt() as attempt:
            self._allocate(poor if place == "before" else None)
            gathered = tp.all_gather(mine)
            self._allocate(poor if place == "after" else None)
        if attempt.failed != (poor < tp.size):
            raise AssertionError(f"attempt {index}, in which rank {poor} was to fail, is wrong")
        if (gathered is None) != (attempt.failed and place == "before"):
            raise AssertionError(f"attempt {index} got as far as it should not")
        if gathered is not None and not torch.equal(gathered, torch.cat(parts, dim=-1)):
            raise AssertionError(f"all_gather {index} of {shape} {dtype} is wrong in an attempt")

    def _allocate(self, poor: int | None) -> None:
        if self._state.tp.rank == poor:
            raise MemoryError

    def stages(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        layout = self._state.layout
        if self._state.previous is not None:
            received = self._state.previous.receive(shape, dtype)
            expected = data((self._seed, index, layout.rank - layout.tp_size), shape, dtype)
            if not torch.equal(received, expected):
                raise AssertionError(f"tensor {index} of {shape} {dtype} is not what was sent")
            received.zero_()
        if self._state.next is not None:
            sent = data((self._seed, index, layout.rank), shape, dtype)
            self._state.next.send(sent)
            sent.zero_()

    def step(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Rows of all engine cores, and a share of their sum, as in a layer with experts."""
        dp, layout = self._state.dp, self._state.layout
        counts = [self._plan.choice((0, *ROWS)) for _ in range(layout.dp_size)]
        dp.begin_step(counts[layout.dp_rank])
        for layer in range(2):
            seeds = [(self._seed, index, layer, layout.rank, core) for core in range(layout.dp_size)]
            rows = [data(seed, (count, shape[1]), dtype) for seed, count in zip(seeds, counts, strict=True)]
            # Now and then not contiguous.
            mine = rows[layout.dp_rank].t().contiguous().t() if layer else rows[layout.dp_rank]
            if not torch.equal(dp.gather(mine), torch.cat(rows)):
                raise AssertionError(f"gather {index} of {counts} rows of {shape[1]} {dtype} is wrong")
            parts = [data((*seed, "sum"), (sum(counts), shape[1]), dtype) for seed in seeds]
            own = [part.split(counts)[layout.dp_rank] for part in parts]
            total = own[0].float()
            for part in own[1:]:
                total = total + part.float()
            self._check(dp.reduce_scatter(parts[layout.dp_rank]), total.to(dtype), own)

    def flags(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        dp = self._state.dp
        setter = self._plan.randrange(2 * dp.size)
        if dp.any(dp.rank == setter) != (setter < dp.size):
            raise AssertionError(f"any {index} of the flag of rank {setter} is wrong")

    def broadcast(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        dp = self._state.dp
        source = self._plan.randrange(dp.size)
        x = data((self._seed, index, self._state.layout.rank, dp.rank), shape, dtype)
        dp.broadcast(x, source)
        if not torch.equal(x, data((self._seed, index, self._state.layout.rank, source), shape, dtype)):
            raise AssertionError(f"broadcast {index} of {shape} {dtype} is wrong")

    def _parts(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        layout = self._state.layout
        first = layout.rank - layout.tp_rank
        parts = [data((self._seed, index, first + rank), shape, dtype) for rank in range(layout.tp_size)]
        mine = parts[layout.tp_rank].clone()
        # Now and then not contiguous.
        return (mine if index % 5 else mine.t().contiguous().t()), parts

    def _compare(self, actual: Tensor, expected: Tensor, parts: list[Tensor]) -> None:
        self._check(actual, expected, parts)
        self._add(actual)

    def _check(self, actual: Tensor, expected: Tensor, parts: list[Tensor]) -> None:
        if self._exact:
            if not torch.equal(actual, expected):
                raise AssertionError(f"the sum of {tuple(actual.shape)} {actual.dtype} is wrong")
        else:
            size = torch.stack([part.float().abs() for part in parts]).sum(0)
            precision = torch.finfo(actual.dtype).eps * len(parts)
            if not ((actual.float() - expected.float()).abs() <= precision * size).all():
                raise AssertionError(f"the sum of {tuple(actual.shape)} {actual.dtype} is too far off")

    def _add(self, result: Tensor) -> None:
        self._digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())


def join(command: dict[str, Any], layout: RankLayout) -> ParallelState:
    """Join the workers of the engine core, then those of the others."""
    cpu, directory, timeout = torch.device("cpu"), command["directory"], command["timeout"]
    state = init.init_parallel(
        layout,
        cpu,
        init_method=f"{command['init_method']}{layout.dp_rank or ''}",
        directory=directory,
        max_tensor_bytes=MAX_TENSOR_BYTES,
        networked=command["networked"],
        timeout=timeout,
    )
    if layout.dp_size == 1:
        return state
    group = join_data_parallel(
        layout,
        cpu,
        init_method=command["cores_meet_at"],
        engine="ranks",
        directory=directory,
        max_tensor_bytes=MAX_TENSOR_BYTES,
        dtype=torch.float32,
        networked=command["networked"],
        timeout=timeout,
    )
    return replace(state, dp=DataParallelEnd(group))


def run(command: dict[str, Any]) -> dict[str, Any]:
    """Join the world of a command, make its calls, leave."""
    layout = RankLayout(*command["layout"])
    torch.set_num_threads(1)
    if command["over"] == "gloo":
        init.shares_memory = data_parallel.shares_memory = lambda: False
    try:
        state = join(command, layout)
    finally:
        init.shares_memory = data_parallel.shares_memory = shares_memory
    with contextlib.closing(state):
        ends = (state.tp, state.previous, state.next, state.dp)
        kinds = [type(end).__name__ for end in ends if end is not None]
        print(json.dumps({"joined": kinds}), flush=True)
        digest = Script(state, command["seed"], command["over"] == "memory").run(command["num_calls"])
        # Nobody may leave while others still wait for what is on its way.
        print(json.dumps({"digest": digest}), flush=True)
        sys.stdin.readline()
    return {"left": True}


def main() -> None:
    """Obey until stdin ends."""
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:  # noqa: BLE001
            answer = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
