"""How a process of an engine learns that the one that started it is gone, and makes sure not to outlive it."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

EXIT_GRACE = 1.5
"""Seconds that a core gets to end by itself once its host is gone."""
PARENT_INTERVAL_MS = 1000
"""Between two looks at whether the parent still runs: a process that it has forked may hold its end of the pipe."""


class Lifeline(threading.Thread):
    """Waits for EOF on the pipe whose other end the parent holds.

    When it comes, the callback given to `notify` is called once, on this thread. A process that has not exited
    `grace` seconds later, or that has given no callback, is ended from here: its main thread may be inside an
    operation that never looks up. `clean_up` is called just before that.
    """

    def __init__(self, fd: int, clean_up: Callable[[], None], grace: float = EXIT_GRACE) -> None:
        super().__init__(name="nbengine-lifeline", daemon=True)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._parent_pid = os.getppid()
        self._clean_up = clean_up
        self._grace = grace
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None
        self.parent_gone = False

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the parent is gone, at once if it is gone already."""
        with self._lock:
            self._callback = callback
            gone = self.parent_gone
        if gone:
            callback()

    def parent_is_gone(self) -> bool:
        """Whether the parent has ended, though this thread may not have noticed yet."""
        return self.parent_gone or os.getppid() != self._parent_pid

    def run(self) -> None:
        """Wait for the end of the parent, then for the grace, then end the process."""
        self._wait_for_end()
        with self._lock:
            self.parent_gone = True
            callback = self._callback
        if callback is not None:
            callback()
            # Only the end of the process ends this wait early.
            threading.Event().wait(self._grace)
        self._clean_up()
        os._exit(1)

    def _wait_for_end(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        while not self.parent_is_gone():
            if not poll.poll(PARENT_INTERVAL_MS):
                continue
            try:
                if not os.read(self._fd, 1):
                    return
            except ConnectionResetError:
                # Of a socket whose other end is gone, with something in it that nobody will read.
                return
