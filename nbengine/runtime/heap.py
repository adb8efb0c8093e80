"""Memory that this process holds and has no use for."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

_SMAPS = Path("/proc/self/smaps")
_CHANGED = "Anonymous:"
"""The line of a mapping that says how much of it is no longer what its file holds."""


def trim_heap() -> None:
    """Give what is free inside this process's heap back to the system, which takes some milliseconds."""
    # Only glibc has it; other C libraries return memory on their own.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def unmap_library(name: str) -> None:
    """Give up the pages of a loaded library, by the name of its file, that are as the file has them: those of its code
    and its constants. What is called again comes back page by page, from the system's copy of the file if there is
    one. Where the system does not list a process's memory, nothing happens."""
    library = ctypes.CDLL(None)
    with contextlib.suppress(FileNotFoundError), _SMAPS.open(encoding="utf-8", errors="replace") as lines:
        # The list is read to its end before anything is given up: reading goes on where memory has not changed.
        for first, behind in list(_unchanged(lines, name)):
            library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(behind - first), mmap.MADV_DONTNEED)


def _unchanged(lines: Iterator[str], name: str) -> Iterator[tuple[int, int]]:
    """Yield the first address and the one behind the last of each mapping of a file that cannot be written and never
    was. Lines are those of `_SMAPS`."""
    place: tuple[int, int] | None = None
    for line in lines:
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):
            first, _, behind = key.partition("-")
            is_found = line.rstrip("\n").endswith(f"/{name}") and rest.startswith(("r--p", "r-xp"))
            place = (int(first, 16), int(behind, 16)) if is_found else None
        elif place is not None and key == _CHANGED and rest.split() == ["0", "kB"]:
            yield place
