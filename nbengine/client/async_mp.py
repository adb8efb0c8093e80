"""The client of `AsyncLLM`: its sockets live on the shared loop thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from nbengine.client.connection import ConnectionInfo
from nbengine.client.core_link import FramesHandler
from nbengine.client.mp import MPClient
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreOutputs

if TYPE_CHECKING:
    from nbengine.frontend.loop_thread import LoopThread

MESSAGES_A_TURN = 64
"""Messages read before the loop gets to look at anything else."""


class OutputHandler(Protocol):
    """Who processes what the engine returns. Called on the loop thread."""

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """A batch of outputs has come."""

    def on_error(self, error: NBEngineError, *, dead: bool) -> None:
        """All requests have failed."""


class AsyncMPClient(MPClient):
    """Outputs go to `output_handler`, on the loop thread, as soon as they are there.

    The sockets are plain ones, read when their descriptors become readable: with `zmq.asyncio` each message costs
    a future and a task switch, twice the time. What is sent and added may come from any thread.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        loop_thread: LoopThread,
        *,
        session: str | None = None,
        owns_engine: bool = False,
        data_parallel_rank: int | None = None,
    ) -> None:
        super().__init__(
            info, session=session, owns_engine=owns_engine, data_parallel_rank=data_parallel_rank
        )
        self.output_handler: OutputHandler | None = None
        self.loop_thread = loop_thread
        self._handlers: dict[zmq.Socket[bytes], tuple[int, FramesHandler]] = {}
        self._sent_on: set[zmq.Socket[bytes]] = set()
        self.loop_thread.call_soon(self.cores.open)
        self.link.start()

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Pass outputs on to whoever processes them."""
        if self.output_handler is not None:
            self.output_handler.on_outputs(outputs)

    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for what comes on a socket from now on."""
        descriptor = socket.fileno()
        self._handlers[socket] = descriptor, handle
        self.loop_thread.loop.add_reader(descriptor, self._on_readable, socket)
        # The descriptor tells of changes only, and something may have come already.
        self.loop_thread.loop.call_soon(self._on_readable, socket)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`."""
        descriptor, _ = self._handlers.pop(socket)
        self._sent_on.discard(socket)
        if not self.loop_thread.loop.is_closed():
            self.loop_thread.loop.remove_reader(descriptor)

    def on_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Remember to read: sending consumes the change that would have told of something there."""
        self._sent_on.add(socket)

    def _run_soon(self, function: Callable[..., None], *args: Any) -> None:
        if self.loop_thread.is_current:
            self._run(function, *args)
        else:
            # The loop is closed at the interpreter's exit.
            with contextlib.suppress(RuntimeError):
                self.loop_thread.call_soon(self._run, function, *args)

    def _deliver_error(self, error: NBEngineError, *, dead: bool) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop_thread.call_soon(self._deliver_error_now, error, dead)

    def _deliver_error_now(self, error: NBEngineError, dead: bool) -> None:
        if self.output_handler is not None:
            self.output_handler.on_error(error, dead=dead)

    def _request_close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop_thread.call_soon(self.cores.close)

    def _close_sockets(self) -> None:
        if self.loop_thread.is_current or self.loop_thread.loop.is_closed():
            self.cores.close()
        else:
            self.loop_thread.run(self._close_async())

    async def _close_async(self) -> None:
        self.cores.close()

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        function(*args)
        self._read_where_sent()

    def _on_readable(self, socket: zmq.Socket[bytes]) -> None:
        self._read(socket)
        self._read_where_sent()

    def _read_where_sent(self) -> None:
        while self._sent_on:
            self._read(self._sent_on.pop())

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
        self.loop_thread.loop.call_soon(self._on_readable, socket)
