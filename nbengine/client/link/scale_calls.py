"""The calls to change the number of engine cores, which the host answers one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import ScaleElasticEP


class ScaleCalls:
    """The calls that have no answer yet, oldest first. It is safe on any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Future[int]] = deque()

    def begin(self, data_parallel_size: int, post: Callable[[ScaleElasticEP], None]) -> Future[int]:
        """Hand the message to `post`; the future gets the host's answer."""
        future: Future[int] = Future()
        with self._lock:
            self._waiting.append(future)
            post(ScaleElasticEP(data_parallel_size))
        return future

    def take(self) -> Future[int] | None:
        """Take out the oldest call, which the host has answered; None if no call waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def fail(self, error: NBEngineError) -> None:
        """Fail all calls: none will be answered."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
