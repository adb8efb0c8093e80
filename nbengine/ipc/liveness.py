"""Whether another process still runs."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import select
import uuid

import psutil

START_TIME_TOLERANCE = 1.0
"""Seconds by which two readings of one process's start may differ: it is computed from the time of boot."""


@functools.cache
def machine_id() -> str:
    """Something that two processes have in common if and only if a pid means the same to both."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        # Of the process's pid namespace: a container's are its own.
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{platform.node()}:{uuid.getnode():x}"


def start_time() -> float:
    """When this process started, in seconds since the epoch."""
    created: float = psutil.Process().create_time()
    return created


class ProcessWatch:
    """Watches the process that has `pid` and started at `created`; a later one with its pid is not it.

    Where the kernel gives out descriptors of processes (`pidfd_open(2)`), asking costs a microsecond.
    """

    def __init__(self, pid: int, created: float) -> None:
        self.pid = pid
        self._fd: int | None = None
        self._gone = pid <= 0
        self._process: psutil.Process | None = None
        if pid == os.getpid() or self._gone:
            return
        self._fd = _open(pid)
        try:
            # After the descriptor: what has the pid now is what the descriptor stands for.
            self._process = psutil.Process(pid)
            self._gone = abs(self._process.create_time() - created) >= START_TIME_TOLERANCE
        except psutil.NoSuchProcess:
            self._gone = True
        self._poll = select.poll() if self._fd is not None else None
        if self._poll is not None and self._fd is not None:
            self._poll.register(self._fd, select.POLLIN)

    def gone(self) -> bool:
        """Whether the process has ended; a zombie has."""
        if self._gone or self._process is None:
            return self._gone
        if self._poll is not None:
            self._gone = bool(self._poll.poll(0))
        else:
            self._gone = not _runs(self._process)
        return self._gone

    def close(self) -> None:
        """Give the descriptor back; again does nothing."""
        if self._fd is not None:
            self._poll = None
            os.close(self._fd)
            self._fd = None


def _open(pid: int) -> int | None:
    if hasattr(os, "pidfd_open"):
        # Refused by old kernels and by some sandboxes.
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
