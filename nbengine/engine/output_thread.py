"""The engine core's output thread: a queue of the busy loop on one side, sockets on the other.

It encodes and sends while the busy loop waits for the model. A client that is slow or gone cannot block it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any, cast

import zmq

from nbengine.engine.work import COORDINATOR_INDEX, AbortRequests, InputQueue, OutputQueue, ThreadFailed
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import ENGINE_CORE_DEAD, AttachClient, DetachClient, EngineCoreOutputs
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.ipc.sockets import make_socket

logger = logging.getLogger(__name__)

OUTPUT_HWM = 100_000
"""Messages that a client may leave unread before it is given up; its lease ends much earlier."""
DEAD_LINGER_MS = 500
"""How long the last message may take to leave."""


class OutputThread(threading.Thread):
    """Encodes and sends what the busy loop and the input thread put into `output_queue`.

    However it ends, the last thing that every client gets is ENGINE_CORE_DEAD.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        engine_index: int,
        coordinator_output: str,
        output_queue: OutputQueue,
        input_queue: InputQueue,
        output_hwm: int = OUTPUT_HWM,
    ) -> None:
        super().__init__(name="nbengine-output", daemon=True)
        self._context = context
        self._engine_index = engine_index
        self._coordinator_output = coordinator_output
        self._output_queue = output_queue
        self._input_queue = input_queue
        self._output_hwm = output_hwm
        self._sockets: dict[int, zmq.Socket[bytes]] = {}
        self._encoder = MsgpackEncoder()
        self._reuse_buffers: list[bytearray] = []
        self._pending: deque[tuple[zmq.MessageTracker, bytearray]] = deque()

    def run(self) -> None:
        """Send until ENGINE_CORE_DEAD comes out of the queue."""
        try:
            self._sockets[COORDINATOR_INDEX] = make_socket(
                self._context, self._coordinator_output, zmq.PUSH, bind=False
            )
            self._process_output_queue()
        except Exception as error:
            logger.exception("the output thread failed")
            self._input_queue.put(ThreadFailed(self.name, error))
        finally:
            self._send_engine_dead()

    def _process_output_queue(self) -> None:
        while True:
            match self._output_queue.get():
                case (client_index, outputs):
                    self._send(client_index, outputs)
                case AttachClient() as client:
                    self._attach(client)
                case DetachClient(client_index):
                    self._detach(client_index)
                case _:
                    return

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        socket = self._sockets.get(client_index)
        if socket is None:
            return
        outputs.engine_index = self._engine_index
        while self._pending and self._pending[0][0].done:
            self._reuse_buffers.append(self._pending.popleft()[1])
        frames, buffer = self._encode(outputs)
        try:
            tracker = socket.send_multipart(cast("Any", frames), flags=zmq.NOBLOCK, copy=False, track=True)
        except zmq.Again:
            logger.warning("client %d does not read its outputs, it is given up", client_index)
            self._detach(client_index)
            self._input_queue.put(AbortRequests(client_index, None))
            return
        if tracker is not None and not tracker.done:
            self._pending.append((tracker, buffer))
        elif len(self._reuse_buffers) <= len(self._sockets):
            self._reuse_buffers.append(buffer)

    def _encode(self, outputs: EngineCoreOutputs) -> tuple[list[Any], bytearray]:
        buffer = self._reuse_buffers.pop() if self._reuse_buffers else bytearray()
        try:
            return self._encoder.encode_into(outputs, buffer), buffer
        except BufferError:
            # ZMQ's tracker reports a message done an instant before it lets go of the buffer.
            buffer = bytearray()
            return self._encoder.encode_into(outputs, buffer), buffer

    def _attach(self, client: AttachClient) -> None:
        try:
            self._sockets[client.client_index] = make_socket(
                self._context, client.output_address, zmq.PUSH, bind=False, send_hwm=self._output_hwm
            )
        except NBEngineError as error:
            logger.warning("no outputs for client %d: %s", client.client_index, error)

    def _detach(self, client_index: int) -> None:
        socket = self._sockets.pop(client_index, None)
        if socket is not None:
            socket.close()

    def _send_engine_dead(self) -> None:
        for client_index, socket in self._sockets.items():
            if client_index != COORDINATOR_INDEX:
                try:
                    socket.send(ENGINE_CORE_DEAD, flags=zmq.NOBLOCK)
                except zmq.Again:
                    logger.warning("client %d cannot be told of the end", client_index)
            socket.close(linger=DEAD_LINGER_MS)
