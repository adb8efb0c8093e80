"""The interfaces through which workers exchange tensors, and the substitutes for a worker without others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nbengine.distributed.layout import ALONE, RankLayout

if TYPE_CHECKING:
    from nbengine.kernels.cpu.jit import Function


class RankOperations(Protocol):
    """A group's exchanges as operations of a `nbengine.kernels.cpu.program.Program`: compiled functions with their
    arguments, whose third word is the number of rows. They count among the group's calls."""

    def sum_rows(self, x: Tensor) -> tuple[Function, ctypes.Structure]:
        """Return the operation that does what `Communicator.all_reduce` does to the first rows of x, float32
        [rows, ...], contiguous, in place."""

    def gather_rows(self, x: Tensor, output: Tensor) -> tuple[Function, ctypes.Structure]:
        """Return the operation that does what `Communicator.all_gather` does with the first rows of x [rows,
        width], contiguous; the outcome goes to the first rows of `output` [rows, size * width], contiguous."""

    def finish(self, arguments: int) -> None:
        """Finish the operation with arguments at this address, which has waited in vain and stopped its program;
        raise what `Communicator.all_reduce` raises."""


Guard = Callable[[], AbstractContextManager[None]]
"""A function whose context is entered before the ranks of a group wait for each other, and left afterwards."""


class Communicator(Protocol):
    """One rank's end of a group. Every rank makes the same calls in the same order, with equal shapes and
    dtypes.

    All ranks get the same bits.
    """

    rank: int
    size: int
    guard: Guard | None
    """The guard of each `all_reduce` and `all_gather`, which have allocated by then what they need to wait for the
    others; None: there is none."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`; it may be `x` itself, overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, concatenated along the last dimension in rank order."""

    def any(self, flag: bool) -> bool:
        """Return whether any rank's `flag` is set; takes no memory."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def operations(self) -> RankOperations | None:
        """Return the exchanges as operations of a program; None: they are none."""

    def close(self) -> None:
        """Leave the group without waiting for the others."""


class DataParallelGroup(Protocol):
    """One end of the group of the workers that have the same place in every engine core.

    Every rank makes the same calls in the same order; the number of tokens may differ from rank to rank.
    """

    @property
    def rank(self) -> int:
        """Return the number of this worker's engine core."""

    @property
    def size(self) -> int:
        """Return the number of engine cores."""

    def begin_step(self, num_tokens: int) -> None:
        """Tell the others how many tokens this rank has in the step that begins, 0 in a dummy batch, and
        learn the same of them."""

    def gather(self, x: Tensor) -> Tensor:
        """Return all ranks' x [own tokens, hidden], one after the other in rank order, [all tokens,
        hidden]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's tokens [own tokens, hidden] of the sum of all ranks' x [all tokens, hidden]."""

    def any(self, flag: bool) -> bool:
        """Return whether any rank's `flag` is set."""

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite `x`, contiguous and of the same shape and dtype everywhere, with what it is on the rank
        `source`."""

    def close(self) -> None:
        """Leave the group without waiting for the others."""


class PipelineLink(Protocol):
    """One end of a line of tensors from a stage to the next, in order."""

    def send(self, x: Tensor) -> None:
        """Send a tensor; return when `x` may be overwritten, which is before it has been received."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, in memory that is the caller's until the next call."""

    def close(self) -> None:
        """Let go of the link without waiting for the other end."""


class World(Protocol):
    """The environment that the ranks of an engine share beside their groups and links."""

    def close(self) -> None:
        """Leave the environment without waiting for the others."""


class SingleRank:
    """The group of a worker without others."""

    rank = 0
    size = 1
    guard: Guard | None = None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def any(self, flag: bool) -> bool:
        """Return `flag`."""
        return flag

    def barrier(self) -> None:
        """Return at once."""

    def operations(self) -> None:
        """Return None: there is nothing to exchange."""

    def close(self) -> None:
        """Do nothing: the group holds nothing."""


class SingleGroup:
    """The data-parallel group of a worker whose engine core is the only one."""

    rank = 0
    size = 1

    def begin_step(self, num_tokens: int) -> None:
        """Do nothing: there is nobody to tell."""

    def gather(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return `x`."""
        return x

    def any(self, flag: bool) -> bool:
        """Return `flag`."""
        return flag

    def broadcast(self, x: Tensor, source: int) -> None:
        """Leave `x` as it is."""

    def close(self) -> None:
        """Do nothing: the group holds nothing."""


@dataclass(frozen=True)
class ParallelState:
    """A worker's place, its tensor-parallel group, its links from the stage before and to the next one, the
    environment of all of these, and its data-parallel group."""

    layout: RankLayout = ALONE
    tp: Communicator = field(default_factory=SingleRank)
    previous: PipelineLink | None = None
    next: PipelineLink | None = None
    world: World | None = None
    dp: DataParallelGroup = field(default_factory=SingleGroup)

    def close(self) -> None:
        """Leave the groups and let go of the links."""
        for end in (self.tp, self.dp, self.previous, self.next, self.world):
            if end is not None:
                end.close()


SINGLE = ParallelState()
"""The state of a worker without others."""
