"""The lifeline of an engine's process: it tells that the process's parent is gone,
and does not let it outlive that."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable

EXIT_GRACE = 1.5
"""Seconds that an engine core gets to end by itself once its host is gone."""
PARENT_INTERVAL_MS = 1000
"""Milliseconds between two looks at whether the parent runs:
a process that it has forked may hold its end of the pipe."""


class Lifeline(threading.Thread):
    """A thread that waits for EOF on the pipe whose other end the parent holds.

    When it comes, the callback given to `notify` is called once, on this thread. A process that has not
    exited `grace` seconds later, or that has given no callback, is ended from here: its main thread may be
    inside an operation that never returns to the interpreter. `clean_up` is called just before that.
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
        self._signals, self._signal_writer = socket.socketpair()
        for end in (self._signals, self._signal_writer):
            end.setblocking(False)
        self._wake: Callable[[], None] | None = None
        self.parent_gone = False
        self._stopped = False

    def notify(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the parent is gone, at once if it is gone already."""
        with self._lock:
            self._callback = callback
            gone = self.parent_gone
        if gone:
            callback()

    def wake_on_signals(self, wake: Callable[[], None]) -> None:
        """Call `wake`, on this thread, after every signal that the process handles; for the main thread.

        Python runs handlers on the main thread between two of its instructions. A signal that comes when it
        has begun to wait for a queue, and does not sleep yet, would be handled only once something else wakes
        it.
        """
        self._wake = wake
        signal.set_wakeup_fd(self._signal_writer.fileno(), warn_on_full_buffer=False)

    def stop(self) -> None:
        """End the thread, and with it the watch; for a process that forks, and must have no other thread."""
        self._stopped = True
        self._signal_writer.send(b"\0")
        self.join()
        self._signals.close()
        self._signal_writer.close()

    def parent_is_gone(self) -> bool:
        """Return whether the parent has ended, though this thread may not have noticed yet."""
        return self.parent_gone or os.getppid() != self._parent_pid

    def run(self) -> None:
        """Wait for the end of the parent, then for the grace, then end the process."""
        self._wait_for_end()
        if self._stopped:
            return
        with self._lock:
            self.parent_gone = True
            callback = self._callback
        if callback is not None:
            callback()
            # Only the end of the process ends this wait early.
            threading.Event().wait(self._grace)
        try:
            self._clean_up()
        finally:
            # Even if it cannot remove its files, this process does not outlive its parent.
            os._exit(1)

    def _wait_for_end(self) -> None:
        poll = select.poll()
        # No event but the end, which every poll reports: data on the pipe is for another thread, and a read
        # here could block.
        poll.register(self._fd, 0)
        poll.register(self._signals, select.POLLIN)
        while not (self._stopped or self.parent_is_gone()):
            ready = {fd for fd, _ in poll.poll(PARENT_INTERVAL_MS)}
            if self._signals.fileno() in ready:
                self._on_signals()
            if self._fd in ready:
                return

    def _on_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._signals.recv(4096)
        if self._wake is not None:
            self._wake()
