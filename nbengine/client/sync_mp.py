"""The client of `LLM`: blocking, with one thread for its sockets."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

import zmq

from nbengine.client.base import BlockingClient
from nbengine.client.connection import ConnectionInfo
from nbengine.client.core_link import FramesHandler
from nbengine.client.mp import MPClient
from nbengine.client.wake import WakePipe
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT = 5.0


class _Failure(NamedTuple):
    error: NBEngineError
    dead: bool
    client_index: int


class SyncMPClient(MPClient, BlockingClient):
    """Outputs wait in a queue for `get_output`.

    The sockets belong to one thread, which also sends: an interrupt that hits the caller in the middle of a
    message of several frames would garble the stream.
    """

    def __init__(
        self, info: ConnectionInfo, *, session: str | None = None, owns_engine: bool = False
    ) -> None:
        super().__init__(info, session=session, owns_engine=owns_engine)
        self._outputs_queue: SimpleQueue[EngineCoreOutputs | _Failure] = SimpleQueue()
        self._outbox: deque[tuple[Callable[..., None], tuple[Any, ...]] | None] = deque()
        self._wake = WakePipe()
        self._poller = zmq.Poller()
        self._handlers: dict[object, FramesHandler] = {}
        self._newest_request_index = 0
        self._thread = threading.Thread(target=self._run, name="nbengine-client", daemon=True)
        self._thread.start()
        self.link.start()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to its engine core."""
        super().add_request(request)
        self._newest_request_index = request.client_index

    def get_output(self) -> EngineCoreOutputs:
        """Wait for the next outputs; an interrupt is raised at once and loses none."""
        while True:
            item = self._outputs_queue.get()
            if isinstance(item, EngineCoreOutputs):
                return item
            if item.dead:
                self._outputs_queue.put(item)
            # A lease that was lost while nothing was asked for concerns nobody.
            if item.dead or item.client_index >= self._newest_request_index:
                raise copy.copy(item.error)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Keep outputs for `get_output`."""
        self._outputs_queue.put(outputs)

    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for what comes on a socket from now on."""
        self._handlers[socket] = handle
        self._poller.register(socket, zmq.POLLIN)

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`."""
        del self._handlers[socket]
        self._poller.unregister(socket)

    def _run_soon(self, function: Callable[..., None], *args: Any) -> None:
        self._outbox.append((function, args))
        self._wake.wake()

    def _deliver_error(self, error: NBEngineError, *, dead: bool) -> None:
        self._outputs_queue.put(_Failure(error, dead, self._client_index))

    def _request_close(self) -> None:
        self._outbox.append(None)
        self._wake.wake()

    def _close_sockets(self) -> None:
        self._request_close()
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        try:
            self._poller.register(self._wake.fileno(), zmq.POLLIN)
            self.cores.open()
            self._serve()
        except Exception as error:
            logger.exception("the sockets of engine %s failed", self.info.name)
            self._fail(EngineDeadError(f"the connection to the engine failed: {error!r}"), dead=True)
        finally:
            self.cores.close()
            self._wake.close()

    def _serve(self) -> None:
        closing = False
        while not closing:
            for source, _ in self._poller.poll():
                if source == self._wake.fileno():
                    closing = self._run_outbox()
                # A socket may have been closed since the poll.
                elif (handle := self._handlers.get(source)) is not None:
                    handle(source.recv_multipart())

    def _run_outbox(self) -> bool:
        """Do what was posted; tells whether the end was."""
        self._wake.drain()
        while self._outbox:
            item = self._outbox.popleft()
            if item is None:
                return True
            function, args = item
            function(*args)
        return False
