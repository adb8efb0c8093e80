"""A pipe that wakes a thread that waits in a poll."""

from __future__ import annotations

import contextlib
import socket


class WakePipe:
    """A file descriptor that becomes readable when `wake` is called;
    `wake` is safe on any thread, at any time."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll for input."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; this has no effect after `close`."""
        # A full pipe wakes as well as one more byte would; behind a closed one, nobody waits.
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Make the descriptor unreadable again; call this before looking for the reason of the wake-up, or
        one may be missed."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                continue

    def close(self) -> None:
        """Release both ends."""
        self._reader.close()
        self._writer.close()
