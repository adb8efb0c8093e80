"""A model's weights while its engine sleeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class WeightsOffload:
    """Takes the memory from weights and gives it back. The tensors stay the same objects, and views of each other:
    their storages are emptied and filled again in place."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        storages = {storage._cdata: storage for storage in (weight.untyped_storage() for weight in weights)}
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copies: list[torch.UntypedStorage] = []
        self._is_lost = False

    @property
    def num_missing_bytes(self) -> int:
        """Memory that `restore` will take on the weights' device."""
        held = sum(storage.nbytes() for storage in self._storages)
        return sum(self._sizes) - held

    def move_to_host(self) -> None:
        """Move the weights to host memory of their own.

        Raises:
            RuntimeError: there is not enough host memory; nothing has changed.
        """
        self._copies = [_host_copy(storage) for storage in self._storages]
        self._empty()

    def drop(self) -> None:
        """Give up the weights, wherever they are."""
        self._copies = []
        self._is_lost = True
        self._empty()

    def restore(self) -> bool:
        """Take the memory again; False if the weights were dropped and have to be loaded into it.

        Raises:
            RuntimeError: there is not enough memory.
        """
        for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
            storage.resize_(num_bytes)
        for storage, copy in zip(self._storages, self._copies, strict=False):
            storage.copy_(copy)
        self._copies = []
        return not self._is_lost

    def _empty(self) -> None:
        for storage in self._storages:
            storage.resize_(0)


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # Pinned: it comes back at the full speed of the bus.
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    copy.copy_(storage)
    return copy
