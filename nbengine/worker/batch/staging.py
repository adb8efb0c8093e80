"""Memory that the host fills step by step, for a device that may be several steps behind."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_NUM_ARRAYS = 2
"""The device reads one while the host fills the other: the host waits only if the device is two steps
behind."""


class StagingBuffer:
    """Memory that numpy fills and the device reads: one array on a CPU, else a few arrays of pinned memory,
    filled in turn, and their copy on the device.

    A step in which nothing is sampled waits for nothing, so that the device may have read none of what
    earlier steps have filled. Each array therefore has an event behind its latest copy, and is filled again
    only after that.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._turn = 0
        self._copied: list[torch.Event] = []
        if device.type == "cpu":
            self._device = torch.zeros(size, dtype=dtype)
            self._hosts = [self._device]
        else:
            self._device = torch.zeros(size, dtype=dtype, device=device)
            self._hosts = [torch.zeros(size, dtype=dtype, pin_memory=True) for _ in range(_NUM_ARRAYS)]
            self._copied = [torch.Event(device) for _ in self._hosts]
        self._arrays = [host.numpy() for host in self._hosts]

    @property
    def array(self) -> NDArray[Any]:
        """Return the array that the next `tensor` hands over; wait until the device has read what the array
        held before."""
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._arrays[self._turn]

    @property
    def device_array(self) -> Tensor:
        """Return all elements as they are on the device, where `tensor` brings the first ones."""
        return self._device

    def tensor(self, count: int) -> Tensor:
        """Return the first `count` elements, on the device, in the order of the stream's work: the next call
        replaces them."""
        if not self._copied:
            return self._device[:count]
        turn = self._turn
        self._turn = (turn + 1) % len(self._hosts)
        staged = self._device[:count].copy_(self._hosts[turn][:count], non_blocking=True)
        self._copied[turn].record()
        return staged
