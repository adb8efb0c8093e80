"""The readings of the history, which the host answers one after the other."""

from __future__ import annotations

import math
import threading
from collections import deque
from concurrent.futures import Future

from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import HistoryPage, ReadHistory

PAUSE = 0.01
"""Least seconds between two readings: a host drops the messages of a client that sends hundreds a second."""


class HistoryCalls:
    """The readings that have no answer yet, oldest first; the first one is sent when its turn comes.

    `begin` and `fail` are safe on any thread, the others belong to the link's thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[tuple[ReadHistory, Future[HistoryPage]]] = deque()
        self._is_sent = False
        """The first one is under way."""
        self._next_at = 0.0

    def begin(self, asked: ReadHistory) -> Future[HistoryPage]:
        """Add a reading; the future gets the host's answer."""
        future: Future[HistoryPage] = Future()
        with self._lock:
            self._waiting.append((asked, future))
        return future

    @property
    def due(self) -> float:
        """Return when `next` has something to send, a time of the monotonic clock; infinity if nothing waits."""
        return self._next_at if self._waiting and not self._is_sent else math.inf

    def next(self, now: float) -> ReadHistory | None:
        """Return the message that is to be sent at `now`, if any is."""
        with self._lock:
            if self._is_sent or not self._waiting or now < self._next_at:
                return None
            self._is_sent = True
            self._next_at = now + PAUSE
            return self._waiting[0][0]

    def answered(self, page: HistoryPage) -> None:
        """Take in the answer to the message that was sent last."""
        with self._lock:
            if not self._is_sent:
                return
            self._is_sent = False
            _, future = self._waiting.popleft()
        if future.set_running_or_notify_cancel():
            future.set_result(page)

    def fail(self, error: NBEngineError) -> None:
        """Fail all readings: none will be answered."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            self._is_sent = False
        for _, future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
