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
from typing import Any

import torch
from torch import Tensor

from nbengine.distributed import init
from nbengine.distributed.communicator import ParallelState
from nbengine.distributed.layout import RankLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (1, 5, 64, 576, 1000)
ROWS = (1, 2, 3, 32, 700)
MAX_TENSOR_BYTES = max(ROWS) * max(WIDTHS) * 4


def data(seed: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `seed` stands for, the same in every process."""
    number = int.from_bytes(hashlib.blake2b(repr(seed).encode(), digest_size=6).digest(), "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
    return (values * 10.0 ** (number % 7 - 3)).to(dtype)


class Script:
    """Random calls: which, comes from the seed alone and is the same on all ranks; when, differs from rank to rank."""

    def __init__(self, state: ParallelState, seed: int, exact: bool) -> None:
        self._state = state
        self._seed = seed
        self._exact = exact
        self._plan = random.Random(seed)
        self._delays = random.Random(seed * 1000 + state.layout.rank)
        self._digest = hashlib.blake2b()

    def run(self, num_calls: int) -> str:
        """Make the calls, compare each result with the reference; the digest of what the ranks of a stage must share."""
        for index in range(num_calls):
            if self._delays.random() < 0.05:
                time.sleep(self._delays.random() * 0.02)
            name = self._plan.choice(("all_reduce", "all_reduce", "all_gather", "barrier", "stages"))
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

    def _parts(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        layout = self._state.layout
        first = layout.rank - layout.tp_rank
        parts = [data((self._seed, index, first + rank), shape, dtype) for rank in range(layout.tp_size)]
        mine = parts[layout.tp_rank].clone()
        # Now and then not contiguous.
        return (mine if index % 5 else mine.t().contiguous().t()), parts

    def _compare(self, actual: Tensor, expected: Tensor, parts: list[Tensor]) -> None:
        if self._exact:
            if not torch.equal(actual, expected):
                raise AssertionError(f"all_reduce of {tuple(actual.shape)} {actual.dtype} is wrong")
        else:
            size = torch.stack([part.float().abs() for part in parts]).sum(0)
            precision = torch.finfo(actual.dtype).eps * len(parts)
            if not ((actual.float() - expected.float()).abs() <= precision * size).all():
                raise AssertionError(f"all_reduce of {tuple(actual.shape)} {actual.dtype} is too far off")
        self._add(actual)

    def _add(self, result: Tensor) -> None:
        self._digest.update(result.contiguous().view(torch.uint8).numpy().tobytes())


def run(command: dict[str, Any]) -> dict[str, Any]:
    """Join the world of a command, make its calls, leave."""
    layout = RankLayout(*command["layout"])
    torch.set_num_threads(1)
    shares_memory = init.shares_memory
    if command["over"] == "gloo":
        init.shares_memory = lambda: False
    try:
        state = init.init_parallel(
            layout,
            torch.device("cpu"),
            init_method=command["init_method"],
            directory=command["directory"],
            max_tensor_bytes=MAX_TENSOR_BYTES,
            timeout=command["timeout"],
        )
    finally:
        init.shares_memory = shares_memory
    with contextlib.closing(state):
        kinds = [type(end).__name__ for end in (state.tp, state.previous, state.next) if end is not None]
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
