"""The weights of a model while its engine sleeps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from nbengine.kernels.cpu.huge_pages import ask_for_huge_pages
from nbengine.models.layers.regions import give_up_pages, is_region


class WeightsOffload:
    """A holder of weights that takes their memory and gives it back. The tensors stay the same objects, and
    views of each other: their storages are emptied and filled again in place. Regions keep their addresses and
    give up their pages."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        storages = {storage._cdata: storage for storage in (weight.untyped_storage() for weight in weights)}
        self._storages = list(storages.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._copies: list[torch.UntypedStorage] = []
        self._is_lost = False
        self._is_empty = False

    @property
    def num_missing_bytes(self) -> int:
        """Return the bytes that `restore` will take on the weights' device."""
        return sum(
            size - (0 if self._is_empty and is_region(storage) else storage.nbytes())
            for storage, size in zip(self._storages, self._sizes, strict=True)
        )

    def move_to_host(self) -> None:
        """Move the weights to new host memory.

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
        """Take the memory again; return False if the weights were dropped and have to be loaded into it.

        Raises:
            RuntimeError: there is not enough memory.
        """
        for storage, num_bytes in zip(self._storages, self._sizes, strict=True):
            if is_region(storage):
                if self._is_lost:
                    # A reading that has failed may have written there.
                    give_up_pages(storage)
                continue
            storage.resize_(num_bytes)
            if storage.device.type == "cpu":
                ask_for_huge_pages(storage)
        for storage, copy in zip(self._storages, self._copies, strict=False):
            storage.copy_(copy)
        self._copies = []
        self._is_empty = False
        return not self._is_lost

    def _empty(self) -> None:
        for storage in self._storages:
            if is_region(storage):
                give_up_pages(storage)
            else:
                storage.resize_(0)
        self._is_empty = True


def _host_copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # Pinned memory is copied back at the full speed of the bus.
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
    copy.copy_(storage)
    return copy
