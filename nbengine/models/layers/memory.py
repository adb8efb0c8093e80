"""The memory of a model's weights: one piece, in huge pages where the system offers them.

A step reads all of it, and with pages of 4 KiB a good part of that time goes into finding them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nbengine.kernels.cpu.huge_pages import ask_for_huge_pages
from nbengine.models.layers.regions import Region

_NOWHERE = torch.device("meta")
_ALIGNMENT = 64

Model = TypeVar("Model")


class WeightMemory(Protocol):
    """Something that gives the blocks of a model the memory of their weights."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor whose content is arbitrary."""

    def apart(self) -> WeightMemory | None:
        """Return the memory of weights that may be given up before the others; None: each has its own."""


Build = Callable[[torch.device, WeightMemory | None], Model]
"""A function that makes a model on a device with its weights in some memory; None: each has its own."""


class Tally:
    """A memory on the device "meta" that counts the bytes it would need."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.apart_tallies: list[Tally] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `WeightMemory.empty`."""
        self.num_bytes += _aligned_bytes(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=_NOWHERE)

    def apart(self) -> Tally:
        """See `WeightMemory.apart`."""
        self.apart_tallies.append(Tally())
        return self.apart_tallies[-1]


class Arena:
    """One piece of a CPU's memory, which is given away from its start on."""

    def __init__(self, memory: Tensor) -> None:
        self._bytes = memory
        self._taken = 0

    @classmethod
    def of_size(cls, num_bytes: int) -> Arena:
        """Make one of new memory, whose storage torch can resize."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        ask_for_huge_pages(memory.untyped_storage())
        return cls(memory)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `WeightMemory.empty`."""
        first, size = self._taken, math.prod(shape) * dtype.itemsize
        self._taken += _aligned_bytes(shape, dtype)
        return self._bytes[first : first + size].view(dtype).view(tuple(shape))

    def apart(self) -> WeightMemory | None:
        """See `WeightMemory.apart`."""
        return None


class RegionArena(Arena):
    """An arena in regions: one for what stays, and one for each block of weights that may be given up."""

    def __init__(self, tally: Tally) -> None:
        self._region = Region(tally.num_bytes)
        self._apart = [RegionArena(each) for each in tally.apart_tallies]
        self._given = iter(self._apart)
        super().__init__(self._region.tensor)

    @property
    def regions(self) -> list[Region]:
        """List the regions, in the order in which they are asked for."""
        return [self._region, *(region for each in self._apart for region in each.regions)]

    def apart(self) -> WeightMemory | None:
        """See `WeightMemory.apart`."""
        return next(self._given)


def allocate(build: Build[Model], device: torch.device) -> Model:
    """Make a model whose weights lie, on a CPU, in one arena of exactly their size."""
    if device.type != "cpu":
        return build(device, None)
    return build(device, Arena.of_size(_tally(build).num_bytes))


def allocate_regions(build: Build[Model]) -> tuple[Model, list[Region]]:
    """Make a model on the CPU whose weights, those apart too, lie in the regions that are returned with it.

    Raises:
        OSError: there is not enough memory.
    """
    arena = RegionArena(_tally(build))
    return build(torch.device("cpu"), arena), arena.regions


def _tally(build: Build[Model]) -> Tally:
    tally = Tally()
    build(_NOWHERE, tally)
    return tally


def _aligned_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
