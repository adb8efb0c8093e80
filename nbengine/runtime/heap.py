"""The memory that the C library keeps for itself."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Give what is free inside this process's heap back to the system, which takes some milliseconds."""
    # Only glibc has it; other C libraries return memory on their own.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
