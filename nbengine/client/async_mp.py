"""The client of `AsyncLLM`: its sockets live on the shared loop thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import zmq

from nbengine.client.connection import ConnectionInfo
from nbengine.client.mp import MPClient
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequestType

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
    ) -> None:
        super().__init__(info, session=session, owns_engine=owns_engine)
        self.output_handler: OutputHandler | None = None
        self.loop_thread = loop_thread
        self._descriptors: list[int] = []
        self.loop_thread.call_soon(self._register)
        self.link.start()

    def _post(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        if self.loop_thread.is_current:
            self._send_now(request_type, payload)
        else:
            self.loop_thread.call_soon(self._send_now, request_type, payload)

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        if self.output_handler is not None:
            self.output_handler.on_outputs(outputs)

    def _deliver_error(self, error: NBEngineError, *, dead: bool) -> None:
        # The loop is closed at the interpreter's exit.
        with contextlib.suppress(RuntimeError):
            self.loop_thread.call_soon(self._deliver_error_now, error, dead)

    def _deliver_error_now(self, error: NBEngineError, dead: bool) -> None:
        if self.output_handler is not None:
            self.output_handler.on_error(error, dead=dead)

    def _request_close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.loop_thread.call_soon(self._unregister)

    def _close_sockets(self) -> None:
        if self.loop_thread.is_current or self.loop_thread.loop.is_closed():
            self._unregister()
        else:
            self.loop_thread.run(self._unregister_async())

    async def _unregister_async(self) -> None:
        self._unregister()

    def _register(self) -> None:
        for socket, handle in (
            (self._output_socket, self._on_output),
            (self._input_socket, self._on_input),
        ):
            descriptor = socket.fileno()
            self._descriptors.append(descriptor)
            self.loop_thread.loop.add_reader(descriptor, self._read, socket, handle)
            # The descriptor tells of changes only, and something may have come already.
            self._read(socket, handle)

    def _unregister(self) -> None:
        while self._descriptors and not self.loop_thread.loop.is_closed():
            self.loop_thread.loop.remove_reader(self._descriptors.pop())
        self._input_socket.close()
        self._output_socket.close()
        self._context.term()

    def _send_now(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        if self._input_socket.closed:
            return
        self._send(request_type, payload)
        # Sending consumes the change that would have told of something to read.
        self._read(self._input_socket, self._on_input)

    def _read(self, socket: zmq.Socket[bytes], handle: Callable[[Sequence[bytes]], None]) -> None:
        for _ in range(MESSAGES_A_TURN):
            if socket.closed:
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            handle(frames)
        self.loop_thread.loop.call_soon(self._read, socket, handle)
