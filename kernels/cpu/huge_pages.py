"""Memory in pages of 2 MiB, where the system offers them, for what each step reads: weights and KV cache."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from functools import cache

import torch

HUGE_PAGE = 2 * 2**20
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
"""From Linux's asm-generic/mman-common.h; the standard library has no names for them."""


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of zeros on the CPU; where `can_take_pages`, none of its memory is taken yet.

    Decode reads a KV cache block by block, in no order: with pages of 2 MiB instead of 4 KiB most of these
    reads find their address translation cached. Where huge pages are unknown or switched off, the pages are
    ordinary ones.

    Raises:
        OSError: there is not enough memory.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = _anonymous(count * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without huge pages refuses; ordinary pages serve as well.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=dtype).view(tuple(shape))
    return tensor if can_take_pages() else tensor.zero_()


@cache
def can_take_pages() -> bool:
    """Return whether the system takes pages on demand of `take_huge_pages` (Linux does since 5.14)."""
    memory = _anonymous(mmap.PAGESIZE)
    return take_huge_pages(torch.frombuffer(memory, dtype=torch.uint8).data_ptr(), mmap.PAGESIZE)


def _anonymous(num_bytes: int) -> mmap.mmap:
    """Map memory that no other process shares: shared memory has no huge pages unless a system is set up so."""
    if sys.platform == "win32":
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def ask_for_small_pages(address: int, num_bytes: int) -> None:
    """Have the first use of memory take ordinary pages, each as it is needed, until `take_huge_pages` comes to it."""
    advice = getattr(mmap, "MADV_NOHUGEPAGE", None)
    if advice is not None:
        # A refusal changes nothing.
        _advise(address, num_bytes, advice)


def take_huge_pages(address: int, num_bytes: int) -> bool:
    """Take the pages of memory, huge ones where it covers them, and leave what is written there; return False if the
    system refuses or has none left.

    Others may use the memory meanwhile.
    """
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = address + num_bytes - first
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None and size >= HUGE_PAGE:
        # A refusal of these two leaves ordinary pages. The second is for what has been used already (Linux 6.1).
        _advise(first, size, advice)
        _advise(first, size, _MADV_COLLAPSE)
    return _advise(first, size, _MADV_POPULATE_WRITE)


def ask_for_huge_pages(storage: torch.UntypedStorage) -> None:
    """Ask the system to put a storage on the CPU, which nothing has been written to, into huge pages.

    It has no effect where huge pages are unknown or switched off.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = storage.data_ptr() + storage.nbytes() - first
    if advice is None or size < HUGE_PAGE:
        return
    # A refusal changes nothing.
    _advise(first, size, advice)


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    # The standard library advises on memory only that it has mapped itself.
    if sys.platform != "linux":
        return False
    madvise = ctypes.CDLL(None).madvise
    return not madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))
