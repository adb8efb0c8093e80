"""The shared event loop as the thread of a client's sockets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from nbengine.client.threads.loop_thread import LoopThread
from nbengine.client.threads.socket_thread import FramesHandler, Sockets
from nbengine.ipc.shortage import Setbacks, is_shortage

MESSAGES_A_TURN = 64
"""Messages that are read before the loop gets to look at anything else."""


class SharedLoop:
    """A `SocketThread` that reads sockets when their descriptors become readable.

    The sockets are plain ones: with `zmq.asyncio` each message costs a future and a task switch, twice the
    time.
    """

    def __init__(self, loop_thread: LoopThread, setbacks: Setbacks) -> None:
        self._loop_thread = loop_thread
        self._setbacks = setbacks
        self._handlers: dict[zmq.Socket[bytes], tuple[int, FramesHandler]] = {}
        self._sent_on: set[zmq.Socket[bytes]] = set()
        self._sockets: Sockets
        self._on_failure: Callable[[BaseException], None]

    def start(self, sockets: Sockets, on_failure: Callable[[BaseException], None]) -> None:
        """Have the sockets opened on the loop."""
        self._sockets, self._on_failure = sockets, on_failure
        self._loop_thread.call_soon(sockets.open)

    def run_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function now if this is the loop's thread, else soon."""
        if self._loop_thread.is_current:
            self._run(function, *args)
        else:
            # The loop is closed at the interpreter's exit.
            self._loop_thread.call_if_open(self._run, function, *args)

    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for every message that comes on a socket from now on."""
        descriptor = socket.fileno()
        self._handlers[socket] = descriptor, handle
        self._loop_thread.loop.add_reader(descriptor, self._on_readable, socket)
        # The descriptor tells of changes only, and a message may have come already.
        self._loop_thread.loop.call_soon(self._on_readable, socket)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`."""
        descriptor, _ = self._handlers.pop(socket)
        self._sent_on.discard(socket)
        if not self._loop_thread.loop.is_closed():
            self._loop_thread.loop.remove_reader(descriptor)

    def on_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Remember to read: sending consumes the change that would have told of a message."""
        self._sent_on.add(socket)

    def request_close(self) -> None:
        """Have the sockets closed soon."""
        self._loop_thread.call_if_open(self._sockets.close)

    def close(self) -> None:
        """Have the sockets closed, and wait for it."""
        if self._loop_thread.is_current or self._loop_thread.loop.is_closed():
            self._sockets.close()
        else:
            self._loop_thread.run(self._close())

    async def _close(self) -> None:
        self._sockets.close()

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        self._attempt(function, *args)
        self._read_where_sent()

    def _on_readable(self, socket: zmq.Socket[bytes]) -> None:
        self._attempt(self._read, socket)
        self._read_where_sent()

    def _attempt(self, function: Callable[..., None], *args: Any) -> None:
        """Call a function, again after a pause if it meets a shortage; any other failure ends the client."""
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 (it is logged, and tried again or ends the client)
            if is_shortage(error):
                pause = self._setbacks.note(error)
                self._loop_thread.loop.call_later(pause, self._run, function, *args)
            else:
                self._on_failure(error)

    def _read_where_sent(self) -> None:
        while self._sent_on:
            self._attempt(self._read, self._sent_on.pop())

    def _read(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(MESSAGES_A_TURN):
            watched = self._handlers.get(socket)
            if watched is None:
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            watched[1](frames)
        self._loop_thread.loop.call_soon(self._on_readable, socket)
