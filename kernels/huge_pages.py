"""Memory for large tables that are read at random places: in huge pages where the system offers them."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros on the CPU; all of its memory is taken at once.

    Decode reads a KV cache block by block, in no order: with pages of 2 MiB instead of 4 KiB most of these
    reads find their address translation cached. Where huge pages are unknown or switched off, the pages are
    ordinary ones.

    Raises:
        OSError: there is not enough memory.
    """
    count = math.prod(shape)
    if not count:
        return torch.zeros(tuple(shape), dtype=dtype)
    memory = mmap.mmap(-1, count * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel built without them refuses; ordinary pages serve as well.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(tuple(shape)).zero_()
