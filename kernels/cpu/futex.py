"""The system call `futex(2)`, with which threads of several processes sleep on a word in shared memory."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

FUTEX_WAIT, FUTEX_WAKE = 0, 1
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}


@functools.cache
def futex_number() -> int | None:
    """Return the number of the system call, None where there is none, or a sandbox forbids it."""
    number = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
    # A process of 32 bits has another number and another time structure.
    if number is None or sys.maxsize < 2**32:
        return None
    word = ctypes.c_uint32(0)
    woken = ctypes.CDLL(None).syscall(number, ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0)
    return number if woken >= 0 else None
