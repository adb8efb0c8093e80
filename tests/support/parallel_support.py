"""The ranks of an engine as threads of one process: communicators and links without processes or shared memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from nbengine.config import ParallelConfig
from nbengine.distributed.communicator import Guard, ParallelState, SingleGroup, SingleRank
from nbengine.distributed.layout import RankLayout, layouts

TIMEOUT_SECONDS = 60.0

T = TypeVar("T")


class RankFailed(Exception):
    """Another rank has raised, so that this one waits in vain."""


class ThreadGroup:
    """The meeting place of one group's ranks, which are threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self._values: list[Tensor | None] = [None] * size
        self._flags = [False] * size

    def exchange(self, rank: int, call: str, value: Tensor | None) -> list[Tensor]:
        """Copies of all ranks' values, in rank order, not to be changed; every rank must make the same call."""
        self._values[rank] = None if value is None else value.clone()
        self._meet(rank, call)
        values = [value for value in self._values if value is not None]
        self._wait()
        return values

    def any(self, rank: int, flag: bool) -> bool:
        """Return whether any rank's flag is set, without tensors."""
        self._flags[rank] = flag
        self._meet(rank, "any")
        found = any(self._flags)
        self._wait()
        return found

    def abort(self) -> None:
        """Wake all that wait, with an error."""
        self._barrier.abort()

    def _meet(self, rank: int, call: str) -> None:
        if rank == 0:
            self._calls = [""] * self.size
        self._wait()
        self._calls[rank] = call
        self._wait()
        calls = list(self._calls)
        if any(call != other for other in calls):
            raise AssertionError(f"the ranks make different calls: {calls}")

    def _wait(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise RankFailed from None


class ThreadCommunicator:
    """A `Communicator` for a thread; `calls` lists what was called, with shapes.

    Sums are float32 in rank order, rounded once; `all_reduce` overwrites its argument, as the real ones may.
    """

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.guard: Guard | None = None
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Communicator.all_reduce`."""
        total, *rest = self._exchange("all_reduce", x)
        wide = total.double() if x.dtype is torch.float64 else total.float()
        for term in rest:
            wide = wide + term
        return x.copy_(wide) if x.is_contiguous() else wide.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        """See `Communicator.all_gather`."""
        return torch.cat(self._exchange("all_gather", x), dim=-1)

    def any(self, flag: bool) -> bool:
        """See `Communicator.any`; `calls` lists it, too."""
        self.calls.append(("any", ()))
        return self._group.any(self.rank, flag)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._group.exchange(self.rank, "barrier", None)

    def operations(self) -> None:
        """See `Communicator.operations`."""

    def close(self) -> None:
        """Nothing is held."""

    def _exchange(self, name: str, x: Tensor) -> list[Tensor]:
        with nullcontext() if self.guard is None else self.guard():
            self.calls.append((name, tuple(x.shape)))
            return self._group.exchange(self.rank, f"{name} of {tuple(x.shape)} {x.dtype}", x)


class ThreadDataParallelGroup:
    """A `DataParallelGroup` for a thread; `calls` lists what was called, with shapes. Sums are as in
    `ThreadCommunicator`."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._group = group
        self._counts = [0] * group.size

    def begin_step(self, num_tokens: int) -> None:
        """See `DataParallelGroup.begin_step`."""
        counts = self._group.exchange(self.rank, "begin_step", torch.tensor(num_tokens))
        self._counts = [int(count) for count in counts]

    def gather(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.gather`."""
        self._note("gather", x, self._counts[self.rank])
        return torch.cat(self._group.exchange(self.rank, f"gather {x.shape[1:]} {x.dtype}", x))

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """See `DataParallelGroup.reduce_scatter`."""
        self._note("reduce_scatter", x, sum(self._counts))
        terms = self._group.exchange(self.rank, f"reduce_scatter {x.shape} {x.dtype}", x)
        total = sum(term.float() for term in terms[1:]) + terms[0].float()
        return total.to(x.dtype).split(self._counts)[self.rank].clone()

    def any(self, flag: bool) -> bool:
        """See `DataParallelGroup.any`."""
        return any(bool(other) for other in self._group.exchange(self.rank, "any", torch.tensor(flag)))

    def broadcast(self, x: Tensor, source: int) -> None:
        """See `DataParallelGroup.broadcast`."""
        self.calls.append(("broadcast", tuple(x.shape)))
        call = f"broadcast {tuple(x.shape)} {x.dtype} of {source}"
        x.copy_(self._group.exchange(self.rank, call, x)[source])

    def close(self) -> None:
        """Nothing is held."""

    def _note(self, name: str, x: Tensor, num_rows: int) -> None:
        if len(x) != num_rows:
            raise AssertionError(f"{name} of {len(x)} rows in a step with {self._counts} tokens")
        self.calls.append((name, tuple(x.shape)))


class ThreadLink:
    """A `PipelineLink` between two threads. What `receive` returned last is overwritten by the next call."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Tensor | None] = queue.Queue()
        self._last: Tensor | None = None

    def send(self, x: Tensor) -> None:
        """See `PipelineLink.send`."""
        self._queue.put(x.clone())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `PipelineLink.receive`."""
        if self._last is not None:
            self._last.fill_(-12345)
        received = self._queue.get(timeout=TIMEOUT_SECONDS)
        if received is None:
            raise RankFailed
        if (tuple(received.shape), received.dtype) != (tuple(shape), dtype):
            raise AssertionError(f"expected {tuple(shape)} {dtype}, got {received.shape} {received.dtype}")
        self._last = received
        return received

    def abort(self) -> None:
        """Wake who waits, with an error."""
        self._queue.put(None)

    def close(self) -> None:
        """Nothing is held."""


class ThreadWorld:
    """The places of all ranks of all cores of an engine, joined; those of the first core come first, each by rank."""

    def __init__(
        self, tp_size: int = 1, pp_size: int = 1, dp_size: int = 1, *, expert_parallel: bool = False
    ) -> None:
        self._groups = [[ThreadGroup(tp_size) for _ in range(pp_size)] for _ in range(dp_size)]
        self._links = [
            [[ThreadLink() for _ in range(tp_size)] for _ in range(pp_size - 1)] for _ in range(dp_size)
        ]
        self._dp_groups = [[ThreadGroup(dp_size) for _ in range(tp_size)] for _ in range(pp_size)]
        self.states = [
            self._state(layout)
            for dp_rank in range(dp_size)
            for layout in layouts(
                ParallelConfig(
                    tensor_parallel_size=tp_size,
                    pipeline_parallel_size=pp_size,
                    data_parallel_size=dp_size,
                    data_parallel_rank=dp_rank,
                    enable_expert_parallel=expert_parallel,
                )
            )
        ]

    def run(self, function: Callable[[ParallelState], T]) -> list[T]:
        """`function` for every rank's state, each in a thread; the results by rank.

        inference_mode and its like are a thread's own: enter them inside `function`. If a rank raises, the
        others are woken, and the first error is raised here.
        """
        with ThreadPoolExecutor(len(self.states)) as pool:
            futures = [pool.submit(self._guarded, function, state) for state in self.states]
        return self._results(futures)

    def _guarded(self, function: Callable[[ParallelState], T], state: ParallelState) -> T:
        try:
            return function(state)
        except BaseException:
            for group in (group for row in (*self._groups, *self._dp_groups) for group in row):
                group.abort()
            for link in (link for core in self._links for row in core for link in row):
                link.abort()
            raise

    @staticmethod
    def _results(futures: list[Future[T]]) -> list[T]:
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, RankFailed)):
            raise error
        return [future.result() for future in futures]

    def _state(self, layout: RankLayout) -> ParallelState:
        pp, tp, dp = layout.pp_rank, layout.tp_rank, layout.dp_rank
        group, dp_group, links = self._groups[dp][pp], self._dp_groups[pp][tp], self._links[dp]
        return ParallelState(
            layout,
            ThreadCommunicator(group, tp) if group.size > 1 else SingleRank(),
            None if layout.is_first_stage else links[pp - 1][tp],
            None if layout.is_last_stage else links[pp][tp],
            dp=ThreadDataParallelGroup(dp_group, dp) if dp_group.size > 1 else SingleGroup(),
        )
