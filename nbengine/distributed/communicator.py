"""What workers exchange tensors through, and what a worker on its own has in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nbengine.distributed.layout import ALONE, RankLayout


class Communicator(Protocol):
    """One rank's end of a group. Every rank makes the same calls in the same order, with equal shapes and dtypes.

    All ranks get the same bits.
    """

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`; may be `x` itself, overwritten."""

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x`, concatenated along the last dimension in rank order."""

    def barrier(self) -> None:
        """Return when all ranks have come here."""

    def close(self) -> None:
        """Leave the group; without waiting for the others."""


class DataParallelGroup(Protocol):
    """One end of the group of the workers that have the same place in every engine core.

    Every rank makes the same calls in the same order; how many tokens it has is its own business.
    """

    @property
    def rank(self) -> int:
        """Number of this one's engine core."""

    @property
    def size(self) -> int:
        """Engine cores."""

    def begin_step(self, num_tokens: int) -> None:
        """Tell the others how many tokens this rank has in the step that begins, 0 in a dummy batch, and hear the
        same of them."""

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x [own tokens, hidden], one after the other in rank order, [all tokens, hidden]."""

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """This rank's tokens [own tokens, hidden] of the sum of all ranks' x [all tokens, hidden]."""

    def any(self, flag: bool) -> bool:
        """Whether any rank's `flag` is set."""

    def broadcast(self, x: Tensor, source: int) -> None:
        """Overwrite `x`, contiguous and of the same shape and dtype everywhere, by what it is on the rank `source`."""

    def close(self) -> None:
        """Leave the group; without waiting for the others."""


class PipelineLink(Protocol):
    """One end of a line of tensors from a stage to the next, in order."""

    def send(self, x: Tensor) -> None:
        """Send; returns when `x` may be overwritten, which is before it has been received."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, in memory that is the caller's until the next call."""

    def close(self) -> None:
        """Let go of it; without waiting for the other end."""


class World(Protocol):
    """What the ranks of an engine share beside their groups and links."""

    def close(self) -> None:
        """Leave it; without waiting for the others."""


class SingleRank:
    """The group of a worker without others."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """`x`."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """`x`."""
        return x

    def barrier(self) -> None:
        """Return at once."""

    def close(self) -> None:
        """Nothing is held."""


class SingleGroup:
    """The data-parallel group of a worker whose engine core is the only one."""

    rank = 0
    size = 1

    def begin_step(self, num_tokens: int) -> None:
        """There is nobody to tell."""

    def gather(self, x: Tensor) -> Tensor:
        """`x`."""
        return x

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """`x`."""
        return x

    def any(self, flag: bool) -> bool:
        """`flag`."""
        return flag

    def broadcast(self, x: Tensor, source: int) -> None:
        """`x` stays what it is."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class ParallelState:
    """A worker's place, its tensor-parallel group, its lines from the stage before and to the next one, what all of
    them are in, and its data-parallel group."""

    layout: RankLayout = ALONE
    tp: Communicator = field(default_factory=SingleRank)
    previous: PipelineLink | None = None
    next: PipelineLink | None = None
    world: World | None = None
    dp: DataParallelGroup = field(default_factory=SingleGroup)

    def close(self) -> None:
        """Leave the group and let go of the lines."""
        for end in (self.tp, self.dp, self.previous, self.next, self.world):
            if end is not None:
                end.close()


SINGLE = ParallelState()
"""Of a worker on its own."""
