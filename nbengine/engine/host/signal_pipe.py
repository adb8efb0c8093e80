"""Signals, and the calls of other threads, as bytes that end a poll."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Collection
from types import FrameType


class SignalPipe:
    """A pipe that takes signals for a poll loop. It must be made on the main thread, once in a process.

    Args:
        numbers: the signals; they have no other effect from now on.
    """

    def __init__(self, numbers: Collection[int]) -> None:
        self._input, self._output = socket.socketpair()
        for end in (self._input, self._output):
            end.setblocking(False)
        # The wakeup socket ends the poll; the handlers have nothing to do but exist.
        signal.set_wakeup_fd(self._output.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, _noted)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._input.fileno()

    def read(self) -> bytes:
        """Return the numbers of the signals that have come, a byte each; 0 where a thread has called `wake`.

        Raises:
            BlockingIOError: nothing has come.
        """
        return self._input.recv(4096)

    def wake(self) -> None:
        """End the poll. Safe on any thread."""
        # When there is no room, bytes that end the poll are there already.
        with contextlib.suppress(BlockingIOError):
            self._output.send(b"\0")

    def close(self) -> None:
        """Stop taking signals; their handlers stay."""
        signal.set_wakeup_fd(-1)
        self._input.close()
        self._output.close()


def _noted(signum: int, frame: FrameType | None) -> None:
    """Do nothing: the poll loop reads the signal from the wakeup socket."""
