"""The client of `LLM`: blocking, with one thread for its sockets."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from queue import SimpleQueue
from typing import Any, NamedTuple

import zmq

from nbengine.client.base import BlockingClient
from nbengine.client.connection import ConnectionInfo
from nbengine.client.mp import MPClient
from nbengine.client.wake import WakePipe
from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType

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
        self._outbox: deque[tuple[EngineCoreRequestType, Any] | None] = deque()
        self._wake = WakePipe()
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

    def _post(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        self._outbox.append((request_type, payload))
        self._wake.wake()

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        self._outputs_queue.put(outputs)

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
        poller = zmq.Poller()
        for source in (self._output_socket, self._input_socket, self._wake):
            poller.register(source, zmq.POLLIN)
        try:
            self._serve(poller)
        except Exception as error:
            logger.exception("the sockets of engine %s failed", self.info.name)
            self._fail(EngineDeadError(f"the connection to the engine failed: {error!r}"), dead=True)
        finally:
            self._input_socket.close()
            self._output_socket.close()
            self._context.term()
            self._wake.close()

    def _serve(self, poller: zmq.Poller) -> None:
        closing = False
        while not closing:
            for source, _ in poller.poll():
                if source is self._output_socket:
                    self._on_output(self._output_socket.recv_multipart())
                elif source is self._input_socket:
                    self._on_input(self._input_socket.recv_multipart())
                else:
                    closing = self._send_outbox()

    def _send_outbox(self) -> bool:
        self._wake.drain()
        while self._outbox:
            item = self._outbox.popleft()
            if item is None:
                return True
            self._send(*item)
        return False
