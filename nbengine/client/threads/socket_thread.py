"""The interface of the thread that the sockets of a client belong to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

FramesHandler = Callable[[Sequence[bytes]], None]


class Sockets(Protocol):
    """The sockets of a client."""

    def open(self) -> None:
        """Begin to read; called on their thread."""

    def close(self) -> None:
        """Close the sockets; another call does nothing."""


class SocketThread(Protocol):
    """A thread that reads sockets and calls functions, one at a time.

    What meets a shortage (of descriptors, of memory) is tried again after a pause. Any other failure is told
    once, and nothing is read after that.
    """

    def start(self, sockets: Sockets, on_failure: Callable[[BaseException], None]) -> None:
        """Open the sockets on the thread, and close them there when it is to end."""

    def run_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called on the thread, in the order of the calls; this is safe on any thread."""

    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for every message that comes on a socket from now on."""

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`; the socket is about to be closed."""

    def on_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Take note that a message was sent on a socket that is also read."""

    def request_close(self) -> None:
        """Have the sockets closed; this does not wait and takes no lock."""

    def close(self) -> None:
        """Have the sockets closed and wait for it; another call does nothing."""
