"""Allocations that fail in a step end the requests for which they were made, and no others.

Ranks that compute the same logits survive together: they agree whether one of them has found too little memory,
before each exchange and at the end of what may be survived. Only steps pay for that whose requests ask for more
than a token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import torch

from nbengine.distributed.communicator import Communicator, SingleRank
from nbengine.errors import NBEngineError
from nbengine.scheduler.output import Fault, ModelRunnerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")

_SIGNS = (
    "DefaultCPUAllocator",
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "ALLOC_FAILED",
)
"""The signs of torch's other errors about memory: its CPU allocator's, and those of CUDA's libraries."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory could not be allocated, on any device."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


class _PeerStarved(NBEngineError):
    """Another rank has found too little memory for what all ranks do."""


class Attempt:
    """A block of a step that may find too little memory; `failed` tells afterwards, the same on all ranks.

    A rank may have come to the end of a block that has failed on another one. What it has computed there is
    therefore used only after the block, and what cannot be undone in the block comes after a `checkpoint`.
    """

    __slots__ = ("_group", "_survives", "failed")

    def __init__(self, group: Communicator, survives: bool) -> None:
        self._group = group
        self._survives = survives
        self.failed = False

    def __enter__(self) -> Self:
        if self._survives and self._group.size > 1:
            self._group.guard = self._exchange
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._group.guard = None
        if not self._survives:
            return False
        if isinstance(error, _PeerStarved):
            self.failed = True
        elif error is None or is_out_of_memory(error):
            self.failed = self._group.any(error is not None)
        if self.failed and error is not None:
            logger.warning("not enough memory for a part of a step: %s", error)
        return self.failed

    def checkpoint(self) -> None:
        """Return when all ranks have come here; raise what ends the block where one of them has failed."""
        if self._survives and self._group.any(False):
            raise _PeerStarved("another rank does not have enough memory")

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Begin an exchange if nobody has failed. It cannot be undone: who fails in it ends the engine."""
        self.checkpoint()
        self._survives = False
        yield
        self._survives = True


class Allocations:
    """The requests of a step that have asked for more memory than there is.

    What is done for several requests at once is done for each alone where it fails: a request that fails
    alone has asked for too much. The forward pass is of no request in particular, and was counted at the
    start: where it fails, the engine ends.
    """

    def __init__(self, group: Communicator | None = None) -> None:
        """Begin with no such request; `group` has the ranks that compute the same logits."""
        self._group = SingleRank() if group is None else group
        self._attempt: Attempt | None = None
        self._starved: set[str] = set()

    def attempt(self, *, is_counted: bool = False) -> Attempt:
        """Return a context that survives a failed allocation; what was begun in it must then have no effect.

        What `is_counted`, that is, was there in the largest step at the start, is not survived by several
        ranks, which would have to agree in every step.
        """
        self._attempt = Attempt(self._group, self._group.size == 1 or not is_counted)
        return self._attempt

    def checkpoint(self) -> None:
        """Within an attempt, return when nothing has failed on any rank so far: what follows is done by all
        ranks or by none, unless it fails itself."""
        if self._attempt is not None:
            self._attempt.checkpoint()

    def starve(self, req_ids: Iterable[str]) -> None:
        """Have requests end with `Fault.OUT_OF_MEMORY` in the output of this step."""
        self._starved.update(req_ids)

    def each(self, work: Callable[[list[T]], R], items: Sequence[T], keep: Callable[[R], object]) -> list[T]:
        """Do work for all items together or, if there is too little memory for that, for each alone, and keep
        what it gives; doing it again for some must do no harm. Return the items for which it has failed."""
        if self._does(work, list(items), keep):
            return []
        return [item for item in items if not self._does(work, [item], keep)]

    def put_faults(self, output: ModelRunnerOutput) -> None:
        """Write into a step's output which requests end with it."""
        if self._starved:
            starved = dict.fromkeys(self._starved.intersection(output.req_ids), Fault.OUT_OF_MEMORY)
            output.faults = {**(output.faults or {}), **starved}
            self._starved.clear()

    def _does(self, work: Callable[[list[T]], R], items: list[T], keep: Callable[[R], object]) -> bool:
        with self.attempt() as attempt:
            done = work(items)
        if not attempt.failed:
            keep(done)
        return not attempt.failed
