"""The pages of a storage that are in memory, one by one.

/proc/self/smaps counts whole mappings, and the system joins a mapping with a neighbour that has the same flags:
which neighbours there are depends on the tests before.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

_ENTRY = 8
"""Bytes of a page's entry in /proc/self/pagemap (Linux, admin-guide/mm/pagemap)."""


def resident_bytes(storage: torch.UntypedStorage) -> int:
    """Return the bytes of the pages of a storage on the CPU that are in memory."""
    first = storage.data_ptr() // mmap.PAGESIZE
    count = -(-(storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE) - first
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(first * _ENTRY)
        entries = bytearray(pagemap.read(count * _ENTRY))
    assert len(entries) == count * _ENTRY
    # Bit 63 says that a page is present: the sign of the number.
    return int((torch.frombuffer(entries, dtype=torch.int64) < 0).sum()) * mmap.PAGESIZE
