"""Shortages that pass, as of file descriptors:
how to tell them from failures, wait until they end, and keep a reserve."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import resource
import time
from collections.abc import Callable

import zmq

SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.ENOSR}
)
"""Error numbers that say "not now": the system has no descriptor, buffer,
memory or process left at the moment."""
REPORT_INTERVAL = 60.0
"""Seconds between two lines in the log about one kind of setback, however many happen."""
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 0.25
"""Seconds between a turn that failed and the next one; each further failure doubles the pause."""
CALM = 1.0
"""Seconds without a failure after which pauses begin short again."""
ROOM = 8
"""Descriptors that must be free for a new socket:
ZeroMQ ends the process when it gets only a part of what it needs."""
RESERVE = 6
"""Descriptors that are enough to look at processes and to remove directories, one after the other."""
MAX_OPEN_FILES = 65536


def is_shortage(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it was raised from, tells of a shortage that may pass."""
    while error is not None:
        if isinstance(error, OSError | zmq.ZMQError) and error.errno in SHORTAGES:
            return True
        error = error.__cause__
    return False


class Setbacks:
    """The setbacks of work that fails again and again in a shortage:
    they are logged rarely, and set the pause between tries."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._pause = 0.0
        self._report_at = self._noted_at = -math.inf

    def note(self, error: BaseException) -> float:
        """Log a failure, unless one was logged lately,
        and return the seconds to wait before the next attempt.

        Raises:
            BaseException: this is the error itself, if it is no shortage.
        """
        if not is_shortage(error):
            raise error
        now = time.monotonic()
        if now >= self._report_at:
            self._report_at = now + REPORT_INTERVAL
            self._logger.warning("%s: %s; trying again", self._what, error)
        lasts = now - self._noted_at <= CALM
        self._noted_at = now
        self._pause = min(2 * self._pause, LONGEST_PAUSE) if lasts else FIRST_PAUSE
        return self._pause


def persist(attempt: Callable[[], object], setbacks: Setbacks, timeout: float) -> bool:
    """Call `attempt` until it meets no shortage; False if it still does after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            attempt()
        except Exception as error:  # noqa: BLE001 (what is no shortage is raised again)
            pause = setbacks.note(error)
        else:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)


class DescriptorReserve:
    """A few descriptors kept back, for work that must be done even when no others are left."""

    def __init__(self, count: int = RESERVE) -> None:
        self._count = count
        self._held: list[int] = []
        self.renew()

    def renew(self) -> None:
        """Take as many descriptors as are missing from the reserve, or as many as the system has left."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def give_back(self) -> None:
        """Give the descriptors back for other uses; another call does nothing."""
        while self._held:
            os.close(self._held.pop())

    def __del__(self) -> None:
        self.give_back()


def check_room(count: int = ROOM) -> None:
    """Check that this process can open `count` more descriptors now.

    Raises:
        OSError: it cannot open them; the error is a shortage.
    """
    held: list[int] = []
    try:
        for _ in range(count):
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            error.errno, f"{os.strerror(error.errno or 0)} ({limit} may be open at a time, ulimit -n)"
        ) from error
    finally:
        for descriptor in held:
            os.close(descriptor)


def raise_file_limit() -> None:
    """Raise this process's limit on open files as far as it may, up to `MAX_OPEN_FILES`;
    for an engine's processes.

    A stranger's connection to a port is an open file until it is refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
