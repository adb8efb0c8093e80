"""How an engine core learns that its host is gone, and makes sure not to outlive it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

EXIT_GRACE = 1.5
"""Seconds that the core gets to end by itself once the host is gone."""


class HostLifeline(threading.Thread):
    """Waits for EOF on the pipe whose other end the host holds.

    When it comes, the callback given to `notify` is called once, on this thread. A core that has not exited
    `grace` seconds later, or that has given no callback yet because it is still starting, is ended from here:
    its main thread may be inside an operation that never looks up. `clean_up` is called just before that.
    """

    def __init__(self, fd: int, clean_up: Callable[[], None], grace: float = EXIT_GRACE) -> None:
        super().__init__(name="nbengine-lifeline", daemon=True)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._clean_up = clean_up
        self._grace = grace
        self._lock = threading.Lock()
        self._callback: Callable[[], None] | None = None
        self.host_gone = False

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the host is gone, at once if it is gone already."""
        with self._lock:
            self._callback = callback
            gone = self.host_gone
        if gone:
            callback()

    def run(self) -> None:
        """Wait for the end of the host, then for the grace, then end the process."""
        while os.read(self._fd, 1):
            continue
        with self._lock:
            self.host_gone = True
            callback = self._callback
        if callback is not None:
            callback()
            # Only the end of the process ends this wait early.
            threading.Event().wait(self._grace)
        self._clean_up()
        os._exit(1)
