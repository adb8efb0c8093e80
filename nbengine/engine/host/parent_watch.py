"""The watch with which the host of a bound engine learns that the process that started it has ended."""

from __future__ import annotations

import os
from collections.abc import Container

import zmq

from nbengine.runtime.processes import PARENT_FD_VARIABLE


class ParentWatch:
    """A watch that sees the end of the parent's pipe, if any, and that this process has another parent.

    The pipe may stay open for longer than the parent lives, because a process that the parent has forked
    holds its other end, too. So the end of the pipe alone is not enough.
    """

    def __init__(self, poller: zmq.Poller) -> None:
        self._poller = poller
        self._pid = os.getppid()
        self._pipe: int | None = None
        inherited = os.environ.get(PARENT_FD_VARIABLE)
        if inherited is not None:
            self._pipe = int(inherited)
            os.set_inheritable(self._pipe, False)
            os.set_blocking(self._pipe, False)
            poller.register(self._pipe, zmq.POLLIN)

    def ended(self, ready: Container[object]) -> bool:
        """Return whether the parent has ended since the last call; `ready` has what the poller has found."""
        at_end = self._pipe is not None and self._pipe in ready and _is_at_end(self._pipe)
        if not at_end and os.getppid() == self._pid:
            return False
        if self._pipe is not None:
            self._poller.unregister(self._pipe)
            os.close(self._pipe)
            self._pipe = None
        self._pid = os.getppid()
        return True


def _is_at_end(pipe: int) -> bool:
    try:
        return not os.read(pipe, 4096)
    except BlockingIOError:
        return False
