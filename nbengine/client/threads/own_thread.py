"""A thread of a client's own for its sockets."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from nbengine.client.link.wake import WakePipe
from nbengine.client.threads.socket_thread import FramesHandler, Sockets
from nbengine.errors import NBEngineError
from nbengine.ipc.shortage import Setbacks

CLOSE_TIMEOUT = 5.0


class OwnThread:
    """A `SocketThread` that polls, for callers that block.

    It also sends: an interrupt that hits the caller in the middle of a message of several frames would garble
    the stream.
    """

    def __init__(self, setbacks: Setbacks) -> None:
        self._setbacks = setbacks
        self._outbox: deque[tuple[Callable[..., None], tuple[Any, ...]] | None] = deque()
        self._wake: WakePipe
        self._poller = zmq.Poller()
        self._handlers: dict[object, FramesHandler] = {}
        self._closing = False
        self._thread: threading.Thread

    def start(self, sockets: Sockets, on_failure: Callable[[BaseException], None]) -> None:
        """Start the thread."""
        self._wake = WakePipe()
        self._thread = threading.Thread(
            target=self._run, args=(sockets, on_failure), name="nbengine-client", daemon=True
        )
        self._thread.start()

    def run_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called on the thread, in the order of the calls."""
        self._outbox.append((function, args))
        self._wake.wake()

    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for every message that comes on a socket from now on."""
        self._handlers[socket] = handle
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`."""
        del self._handlers[socket]
        self._poller.unregister(socket)

    def on_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Do nothing: a poll finds messages that came before something was sent."""

    def request_close(self) -> None:
        """Have the thread close the sockets and end."""
        self._outbox.append(None)
        self._wake.wake()

    def close(self) -> None:
        """Have the thread close the sockets and end, and wait for it unless called on it."""
        self.request_close()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self, sockets: Sockets, on_failure: Callable[[BaseException], None]) -> None:
        try:
            self._poller.register(self._wake.fileno(), zmq.POLLIN)
            sockets.open()
            self._serve()
        except Exception as error:  # noqa: BLE001 (it is logged, and ends the client)
            on_failure(error)
        finally:
            sockets.close()
            self._wake.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except (OSError, zmq.ZMQError, NBEngineError) as error:
                time.sleep(self._setbacks.note(error))

    def _turn(self) -> None:
        # The wake-up for functions that are left from a turn with a shortage has been used: poll without
        # waiting.
        for source, _ in self._poller.poll(0 if self._outbox else None):
            if source == self._wake.fileno():
                self._wake.drain()
            # A socket may have been closed since the poll.
            elif (handle := self._handlers.get(source)) is not None:
                handle(source.recv_multipart())
        if self._outbox:
            self._run_outbox()

    def _run_outbox(self) -> None:
        """Call the posted functions; one that meets a shortage stays for the next turn."""
        while self._outbox and not self._closing:
            item = self._outbox[0]
            if item is None:
                self._closing = True
            else:
                function, args = item
                function(*args)
            self._outbox.popleft()
