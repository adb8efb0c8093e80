"""A log for lines that peers can cause: it keeps them few, short, and without control characters."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from nbengine.errors import quoted, shown

INTERVAL = 60.0
"""Seconds for which lines are counted."""
LINES_OF_PEER = 10
"""The most lines of one kind that one peer can cause in `INTERVAL` seconds."""
LINES_OF_KIND = 30
"""The most lines of one kind that all peers together can cause in `INTERVAL` seconds."""
LONGEST_PART = 300
"""The most characters of an argument that are written."""


class PeerLog:
    """A log that writes the first lines of each kind and peer, and later how many more it left out.

    It is safe on any thread.

    A kind is a message before its arguments are put in. Every argument is cut and escaped (`printable`).
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._until = clock() + INTERVAL
        self._by_peer: Counter[tuple[str, object]] = Counter()
        self._by_kind: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()

    def warn_of(
        self, peer: object, message: str, *args: object, exc_info: BaseException | None = None
    ) -> None:
        """Log a warning that `peer`, anything hashable, has caused, unless there have been too many."""
        with self._lock:
            finished = self._begin_anew() if self._clock() >= self._until else None
            is_written = self._count(message, peer)
        for kind, number in (finished or {}).items():
            self._logger.warning("%d more lines were left out in %g s, of: %s", number, INTERVAL, kind)
        if is_written:
            self._logger.warning(message, *map(printable, args), exc_info=exc_info)

    def _begin_anew(self) -> Counter[str]:
        finished, self._left_out = self._left_out, Counter()
        self._until = self._clock() + INTERVAL
        self._by_peer.clear()
        self._by_kind.clear()
        return finished

    def _count(self, message: str, peer: object) -> bool:
        if self._by_kind[message] >= LINES_OF_KIND or self._by_peer[message, peer] >= LINES_OF_PEER:
            self._left_out[message] += 1
            return False
        self._by_kind[message] += 1
        self._by_peer[message, peer] += 1
        return True


def printable(value: object) -> str | int | float:
    """Make a value fit for a line of the log: text is cut, and its control characters are escaped."""
    if isinstance(value, (int, float)):
        return value
    return quoted(value, LONGEST_PART) if isinstance(value, bytes) else shown(value, LONGEST_PART)
