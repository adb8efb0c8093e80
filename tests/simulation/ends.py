"""Pipes, pairs of sockets, and `select.poll`."""

from __future__ import annotations

import contextlib
import errno
import select
from typing import Any, Self

import zmq

from tests.simulation import state
from tests.simulation.polling import HANG_UP, SimPoller
from tests.simulation.processes import End, make_pair, make_pipe


def os_pipe() -> tuple[int, int]:
    """`os.pipe`."""
    process = state.process()
    process.outside("pipe", opens=2)
    reader, writer = make_pipe()
    return process.open_number(reader), process.open_number(writer)


def os_set_blocking(number: int, blocks: bool) -> None:
    """`os.set_blocking`."""
    state.process().descriptors[number].blocks = blocks


class SimSocketEnd:
    """`socket.socket`, one of a pair."""

    def __init__(self, end: End) -> None:
        self._end = end
        self._number = state.process().open_number(end)

    def fileno(self) -> int:
        return self._number

    def setblocking(self, flag: bool) -> None:
        """Do nothing, since no call here waits."""

    def send(self, data: bytes) -> int:
        if self._number < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        sent = self._end.write(data)
        state.hub().maybe_preempt()
        return sent

    def recv(self, size: int) -> bytes:
        if self._number < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if not self._end.readable():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return self._end.read(size)

    def close(self) -> None:
        if self._number >= 0:
            with contextlib.suppress(OSError):
                state.process().close_number(self._number)
            self._number = -1

    def detach(self) -> int:
        number, self._number = self._number, -1
        return number

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def socketpair(*_: Any) -> tuple[SimSocketEnd, SimSocketEnd]:
    """`socket.socketpair`."""
    state.process().outside("socketpair", opens=2)
    one, two = make_pair()
    return SimSocketEnd(one), SimSocketEnd(two)


class SimPoll:
    """`select.poll`."""

    def __init__(self) -> None:
        self._poller = SimPoller()

    def register(self, descriptor: Any, flags: int = select.POLLIN) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        wanted = (zmq.POLLIN if flags & select.POLLIN else 0) | (zmq.POLLOUT if flags & select.POLLOUT else 0)
        self._poller.register(number, wanted | HANG_UP)

    def unregister(self, descriptor: Any) -> None:
        self._poller.unregister(descriptor if isinstance(descriptor, int) else descriptor.fileno())

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        return [
            (number, select.POLLIN if events & zmq.POLLIN else select.POLLHUP)
            for number, events in self._poller.poll(timeout)
        ]
