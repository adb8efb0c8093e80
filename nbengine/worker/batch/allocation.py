"""Allocations that fail in a step end the requests for which they were made, and no others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeVar

import torch

from nbengine.scheduler.output import Fault, ModelRunnerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

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


class Attempt:
    """A block of a step that may find too little memory; `failed` tells afterwards."""

    __slots__ = ("_survives", "failed")

    def __init__(self, survives: bool) -> None:
        self._survives = survives
        self.failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._survives and is_out_of_memory(error):
            logger.warning("not enough memory for a part of a step: %s", error)
            self.failed = True
        return self.failed


class Allocations:
    """The requests of a step that have asked for more memory than there is.

    What is done for several requests at once is done for each alone where it fails: a request that fails
    alone has asked for too much. The forward pass is of no request in particular, and was counted at the
    start: where it fails, the engine ends. The engine also ends where several ranks compute the same logits,
    because the others know nothing of one rank's shortage and would go on to other tokens.
    """

    def __init__(self, is_alone: bool = True) -> None:
        """Begin with no such request; `is_alone` says that no other rank computes the same logits."""
        self._is_alone = is_alone
        self._starved: set[str] = set()

    def attempt(self) -> Attempt:
        """Return a context that survives a failed allocation; what was begun in it must then have no
        effect."""
        return Attempt(self._is_alone)

    def starve(self, req_ids: Iterable[str]) -> None:
        """Have requests end with `Fault.OUT_OF_MEMORY` in the output of this step."""
        self._starved.update(req_ids)

    def each(self, work: Callable[[list[T]], object], items: Sequence[T]) -> list[T]:
        """Do work for all items together or, if there is too little memory for that, for each alone; doing it
        again for some must do no harm. Return the items for which it has failed."""
        with self.attempt() as together:
            work(list(items))
        return [item for item in items if not self._does(work, item)] if together.failed else []

    def put_faults(self, output: ModelRunnerOutput) -> None:
        """Write into a step's output which requests end with it."""
        if self._starved:
            starved = dict.fromkeys(self._starved.intersection(output.req_ids), Fault.OUT_OF_MEMORY)
            output.faults = {**(output.faults or {}), **starved}
            self._starved.clear()

    def _does(self, work: Callable[[list[T]], object], item: T) -> bool:
        with self.attempt() as alone:
            work([item])
        return not alone.failed
