"""Memory whose pages can be given up, and exchanged for those of a file, while tensors lie in it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nbengine.kernels.cpu.huge_pages import HUGE_PAGE, ask_for_huge_pages

_SMAPS = "/proc/self/smaps"
_MADV_POPULATE_READ = 22
"""From Linux's asm-generic/mman-common.h; the standard library has no name for it."""
_MAP_FIXED = 0x10
"""From Linux's asm-generic/mman-common.h."""
_READ = 64 << 20
"""Bytes that are asked of a file at a time."""


def has_regions() -> bool:
    """Return whether this system can exchange the pages of memory in use."""
    return sys.platform == "linux"


class Region:
    """A piece of a CPU's memory: private pages, in huge pages where the system offers them.

    `tensor` is all of it, uint8 [bytes], and keeps it alive. Its storage cannot be resized, unlike those that
    torch allocates.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        """The size, whole pages."""
        # A file's huge pages serve only addresses that are multiples of their size.
        slack = HUGE_PAGE if self.num_bytes >= HUGE_PAGE else 0
        size = max(self.num_bytes, mmap.PAGESIZE)
        memory = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        first = -whole.data_ptr() % HUGE_PAGE if slack else 0
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first)
        ask_for_huge_pages(whole.untyped_storage())
        self.tensor: Tensor = whole[: self.num_bytes]

    @property
    def address(self) -> int:
        """Return the address of the first byte."""
        return self.tensor.data_ptr()

    def map_file(self, descriptor: int, offset: int) -> None:
        """Put the file's bytes from `offset` on, whole pages, in the place of what is here.

        Other processes that map the file share its pages with this one. What is written here later stays here.

        Raises:
            OSError: the file cannot be mapped; nothing has changed.
        """
        self._map(mmap.MAP_PRIVATE, descriptor, offset)
        # The system reads ahead in huge pages then.
        _advise(self.address, self.num_bytes, mmap.MADV_HUGEPAGE)

    def read_file(self, descriptor: int, offset: int) -> None:
        """Copy the file's bytes from `offset` on to new pages, in the place of what is here.

        Raises:
            OSError: the file cannot be read.
        """
        self.clear()
        left = self.tensor.numpy().data
        while left:
            done = os.preadv(descriptor, [left[:_READ]], offset)
            if not done:
                raise OSError(errno.EIO, "the file is cut off")
            left, offset = left[done:], offset + done

    def clear(self) -> None:
        """Put new pages, all zero, in the place of what is here."""
        self._map(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        ask_for_huge_pages(self.tensor.untyped_storage())

    def take_pages(self, on_bytes: Callable[[int], None]) -> None:
        """Have all pages of a mapped file at hand, so that no step waits for one; where the system cannot,
        steps do. `on_bytes` is told how much of the file has been read.

        Raises:
            OSError: the file cannot be read.
        """
        for first in range(0, self.num_bytes, _READ):
            num_bytes = min(_READ, self.num_bytes - first)
            number = _advise(self.address + first, num_bytes, _MADV_POPULATE_READ)
            if number not in (0, errno.EINVAL):
                raise OSError(number, os.strerror(number))
            on_bytes(num_bytes)

    def _map(self, flags: int, descriptor: int, offset: int) -> None:
        if not self.num_bytes:
            return
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        found = library.mmap(
            ctypes.c_void_p(self.address),
            ctypes.c_size_t(self.num_bytes),
            mmap.PROT_READ | mmap.PROT_WRITE,
            flags | _MAP_FIXED,
            descriptor,
            ctypes.c_long(offset),
        )
        if found != self.address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def is_region(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage is that of a region: whole pages, which torch has not allocated."""
    if storage.device.type != "cpu" or storage.resizable():
        return False
    return not (storage.data_ptr() % mmap.PAGESIZE or storage.nbytes() % mmap.PAGESIZE)


def give_up_pages(storage: torch.UntypedStorage) -> None:
    """Give up the pages of a region; what it holds afterwards are the mapped file's bytes, else zeros."""
    _advise(storage.data_ptr(), storage.nbytes(), mmap.MADV_DONTNEED)


def _advise(address: int, num_bytes: int, advice: int) -> int:
    """Tell the system what becomes of whole pages; return the error number of a refusal, which changes
    nothing."""
    library = ctypes.CDLL(None, use_errno=True)
    refused = library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(advice))
    return ctypes.get_errno() if refused else 0


def huge_file_bytes(regions: Sequence[Region]) -> int:
    """Count the bytes in regions that are huge pages of mapped files."""
    found, is_inside = 0, False
    with contextlib.suppress(OSError, ValueError), open(_SMAPS, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, rest = line.partition(" ")
            if not name.endswith(":"):
                first = int(name.partition("-")[0], 16)
                is_inside = any(each.address <= first < each.address + each.num_bytes for each in regions)
            elif is_inside and name == "FilePmdMapped:":
                found += int(rest.split()[0]) << 10
    return found
