"""Taking all file descriptors away, from this process or from another, and giving them back."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

import psutil


def _first_above(pid: int) -> int:
    return max(int(name) for name in os.listdir(f"/proc/{pid}/fd")) + 1


@contextlib.contextmanager
def exhausted() -> Iterator[None]:
    """This process cannot open another file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_first_above(os.getpid()), hard))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


@contextlib.contextmanager
def starved(pid: int) -> Iterator[None]:
    """Another process cannot open another file but in the place of one that it closes."""
    process = psutil.Process(pid)
    before = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (_first_above(pid), before[1]))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, before)
