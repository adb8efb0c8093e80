"""Waking a thread that waits in a poll."""

from __future__ import annotations

import contextlib
import socket


class WakePipe:
    """A file descriptor that becomes readable when `wake` is called; `wake` is safe on any thread, at any time."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The descriptor to poll for input."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make the descriptor readable; without effect after `close`."""
        # A full pipe wakes as well as one more byte would; a closed one has nobody to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def drain(self) -> None:
        """Make the descriptor unreadable again; to be called before looking at what the wake-up was for."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                continue

    def close(self) -> None:
        """Release both ends."""
        self._reader.close()
        self._writer.close()
