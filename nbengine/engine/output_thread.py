"""The engine core's output thread: a queue of the busy loop on one side, sockets on the other.

It encodes and sends while the busy loop waits for the model. A client that is slow or gone can neither block it
nor make it hold more than a bounded number of bytes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from queue import Empty
from typing import Any, cast

import zmq

from nbengine.config.engine import DEFAULT_CLIENT_BACKLOG_BYTES
from nbengine.engine.backlog import Backlog, EncodedAnswer
from nbengine.engine.connections import output_watch_name
from nbengine.engine.work import (
    COORDINATOR_INDEX,
    AbortRequests,
    GiveUpClient,
    InputQueue,
    OutputItem,
    OutputQueue,
    ThreadFailed,
)
from nbengine.errors import NBEngineError
from nbengine.ipc.connection_watch import ConnectionWatch
from nbengine.ipc.control_messages import AttachClient, DetachClient
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    KV_TOPIC,
    TRACE_TOPIC,
    EngineCoreOutputs,
    encode_incarnation,
    engine_identity,
)
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import is_tcp
from nbengine.kv_cache.events import KVCacheSnapshot, KVEventBatch, KVMessage
from nbengine.metrics.trace import TraceBatch, TraceMessage, TraceSnapshot
from nbengine.units import size

logger = logging.getLogger(__name__)

OUTPUT_HWM = 64
"""Messages on their way to one client; what comes after them is merged until there is room."""
COORDINATOR_HWM = 1000
"""Messages on their way to the coordinator; of the statistics after them the newest are kept."""
MAX_LARGE_BYTES = 4 << 20
"""Bytes of large messages on their way to one client before the rest is merged, too."""
FIRST_RETRY = 0.0005
"""Seconds until the first look at a client that did not read: after a burst there is soon room again."""
RETRY_INTERVAL = 0.01
"""Seconds between two looks at clients that go on not reading; the first ones follow at twice the interval before."""
PATIENCE = 0.5
"""Seconds that the last messages may take to leave."""


class _Sink:
    """One client's socket, and what does not fit into it."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.backlog = Backlog()
        self._in_flight: deque[tuple[zmq.MessageTracker, bytearray | None, int]] = deque()
        self._large_bytes = 0

    def has_room(self) -> bool:
        """Whether the large messages that ZMQ still holds leave room for more."""
        return self._large_bytes < MAX_LARGE_BYTES

    def hold(self, tracker: zmq.MessageTracker, buffer: bytearray | None, num_bytes: int) -> None:
        """Remember a message that ZMQ sends from its own memory."""
        self._in_flight.append((tracker, buffer, num_bytes))
        self._large_bytes += num_bytes

    def reclaim(self) -> list[bytearray]:
        """Forget the messages that have left, and return their buffers."""
        buffers = []
        while self._in_flight and self._in_flight[0][0].done:
            _, buffer, num_bytes = self._in_flight.popleft()
            self._large_bytes -= num_bytes
            if buffer is not None:
                buffers.append(buffer)
        return buffers


class OutputThread(threading.Thread):
    """Encodes and sends what the busy loop and the input thread put into `output_queue`.

    A client's outputs that ZMQ does not take wait in its `Backlog`. When that exceeds `backlog_limit` bytes, its
    contents are dropped and all requests of the client end with an error that says so.

    However it ends, the last thing that every client gets is ENGINE_CORE_DEAD.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        engine_index: int,
        coordinator_output: str,
        output_queue: OutputQueue,
        input_queue: InputQueue,
        backlog_limit: int = DEFAULT_CLIENT_BACKLOG_BYTES,
        incarnation: int = 0,
    ) -> None:
        super().__init__(name="nbengine-output", daemon=True)
        self._context = context
        self._engine_index = engine_index
        self._incarnation = incarnation
        self._farewell = [
            ENGINE_CORE_DEAD,
            engine_identity(engine_index),
            encode_incarnation(incarnation),
        ]
        self._coordinator_output = coordinator_output
        self._output_queue = output_queue
        self._input_queue = input_queue
        self._backlog_limit = backlog_limit
        self.patience = PATIENCE
        """Seconds that the last messages may take to leave; to be set before the last item is put."""
        self._sinks: dict[int, _Sink] = {}
        self._behind: set[int] = set()
        self._retry_after = FIRST_RETRY
        self._retry_at = 0.0
        self._encoder = MsgpackEncoder()
        self._reuse_buffers: list[bytearray] = []

    def run(self) -> None:
        """Send until ENGINE_CORE_DEAD comes out of the queue."""
        try:
            self._sinks[COORDINATOR_INDEX] = self._connect(self._coordinator_output, COORDINATOR_HWM)
            self._process_output_queue()
        except Exception as error:
            logger.exception("the output thread failed")
            self._input_queue.put(ThreadFailed(self.name, error))
        finally:
            self._send_engine_dead()

    def _process_output_queue(self) -> None:
        while True:
            match self._next_item():
                case None:
                    pass
                case (client_index, outputs):
                    self._send(client_index, outputs)
                case KVEventBatch() | KVCacheSnapshot() as message:
                    self._publish(KV_TOPIC, message)
                case TraceBatch() | TraceSnapshot() as message:
                    self._publish(TRACE_TOPIC, message)
                case AttachClient() as client:
                    self._attach(client)
                case DetachClient(client_index):
                    self._detach(client_index)
                case _:
                    return
            if self._behind and time.monotonic() >= self._retry_at:
                self._retry()

    def _next_item(self) -> OutputItem | None:
        """The next item; None when there is none and it is time to look at clients that are behind."""
        if not self._behind:
            return self._output_queue.get()
        try:
            return self._output_queue.get(timeout=self._retry_after)
        except Empty:
            return None

    def _send(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        sink = self._sinks.get(client_index)
        if sink is None:
            return
        self._sign(outputs)
        if client_index in self._behind:
            self._add_to_backlog(client_index, sink, outputs)
            return
        self._reuse_buffers.extend(sink.reclaim())
        if not (sink.has_room() and self._send_now(sink, sink.backlog.filter(outputs))):
            self._behind.add(client_index)
            self._retry_after = FIRST_RETRY
            self._retry_at = time.monotonic() + FIRST_RETRY
            self._add_to_backlog(client_index, sink, outputs)

    def _sign(self, outputs: EngineCoreOutputs) -> None:
        outputs.engine_index = self._engine_index
        outputs.incarnation = self._incarnation

    def _send_now(self, sink: _Sink, outputs: EngineCoreOutputs) -> bool:
        frames, buffer = self._encode(outputs)
        try:
            tracker = self._send_frames(sink, frames)
        except zmq.Again:
            tracker = None
        if tracker is not None and not tracker.done:
            sink.hold(tracker, buffer, sum(len(frame) for frame in frames))
        elif len(self._reuse_buffers) <= len(self._sinks):
            self._reuse_buffers.append(buffer)
        return tracker is not None

    def _send_frames(self, sink: _Sink, frames: list[Any]) -> zmq.MessageTracker:
        tracker = sink.socket.send_multipart(cast("Any", frames), flags=zmq.NOBLOCK, copy=False, track=True)
        return cast("zmq.MessageTracker", tracker)

    def _encode(self, outputs: EngineCoreOutputs) -> tuple[list[Any], bytearray]:
        buffer = self._reuse_buffers.pop() if self._reuse_buffers else bytearray()
        try:
            return self._encoder.encode_into(outputs, buffer), buffer
        except BufferError:
            # ZMQ's tracker reports a message done an instant before it lets go of the buffer.
            buffer = bytearray()
            return self._encoder.encode_into(outputs, buffer), buffer

    def _publish(self, topic: bytes, message: KVMessage | TraceMessage) -> None:
        message.incarnation = self._incarnation
        # A host that does not read loses it, and the subscribers see the gap.
        with contextlib.suppress(zmq.Again):
            frames = [topic, *self._encoder.encode(message)]
            self._sinks[COORDINATOR_INDEX].socket.send_multipart(cast("Any", frames), flags=zmq.NOBLOCK)

    # Clients that are behind.

    def _add_to_backlog(self, client_index: int, sink: _Sink, outputs: EngineCoreOutputs) -> None:
        answer = outputs.utility_output
        if answer is None:
            sink.backlog.add(outputs)
        else:
            sink.backlog.add_answer(answer.call_id, self._encoder.encode(outputs))
        if sink.backlog.num_bytes > self._backlog_limit:
            self._give_up(client_index, sink)

    def _retry(self) -> None:
        """Send to the clients that are behind as much as they take."""
        self._retry_after = min(2 * self._retry_after, RETRY_INTERVAL)
        self._retry_at = time.monotonic() + self._retry_after
        for client_index in sorted(self._behind):
            if self._flush(self._sinks[client_index]):
                self._behind.discard(client_index)

    def _flush(self, sink: _Sink) -> bool:
        """Send from the backlog while there is room; tells whether nothing is left of it."""
        while sink.backlog:
            sink.reclaim()
            if not (sink.has_room() and sink.socket.poll(0, zmq.POLLOUT)):
                return False
            item = sink.backlog.pop()
            frames = item.frames if isinstance(item, EncodedAnswer) else self._encode_merged(item)
            tracker = self._send_frames(sink, frames)
            if not tracker.done:
                sink.hold(tracker, None, sum(len(frame) for frame in frames))
        return True

    def _encode_merged(self, outputs: EngineCoreOutputs) -> list[Any]:
        self._sign(outputs)
        return list(self._encoder.encode(outputs))

    def _give_up(self, client_index: int, sink: _Sink) -> None:
        reason = (
            f"the client did not read its outputs, and more than {size(self._backlog_limit)} of them were waiting "
            f"(client_backlog_bytes={self._backlog_limit})"
        )
        logger.warning("client %d is given up: %s", client_index, reason)
        for answer in sink.backlog.give_up(reason):
            outputs = EngineCoreOutputs(utility_output=answer)
            self._sign(outputs)
            sink.backlog.add_answer(answer.call_id, self._encoder.encode(outputs))
        if sink.backlog.num_bytes <= self._backlog_limit:
            self._input_queue.put(GiveUpClient(client_index, reason))
            return
        # Even the errors are too many.
        self._detach(client_index)
        self._input_queue.put(AbortRequests(client_index, None))

    # Clients that come and go.

    def _connect(self, address: str, hwm: int = OUTPUT_HWM) -> _Sink:
        return _Sink(make_socket(self._context, address, zmq.PUSH, bind=False, send_hwm=hwm))

    def _attach(self, client: AttachClient) -> None:
        try:
            sink = self._connect(client.output_address)
        except NBEngineError as error:
            logger.warning("no outputs for client %d: %s", client.client_index, error)
            return
        self._sinks[client.client_index] = sink
        if is_tcp(client.output_address):
            ConnectionWatch.announce(sink.socket, output_watch_name(client.client_index))

    def _detach(self, client_index: int) -> None:
        self._behind.discard(client_index)
        sink = self._sinks.pop(client_index, None)
        if sink is not None:
            ConnectionWatch.withdraw(sink.socket)
            sink.socket.close()

    def _send_engine_dead(self) -> None:
        end = time.monotonic() + self.patience
        # Those that are behind last: the others need not wait for them.
        for client_index, sink in sorted(self._sinks.items(), key=lambda item: item[0] in self._behind):
            if client_index != COORDINATOR_INDEX and not self._send_last(sink, end):
                logger.warning("client %d cannot be told of the end", client_index)
            ConnectionWatch.withdraw(sink.socket)
            sink.socket.close(linger=int(1000 * self.patience))

    def _send_last(self, sink: _Sink, end: float) -> bool:
        """Send the backlog and ENGINE_CORE_DEAD to a client that reads; tells whether that was possible in time."""
        while not self._flush(sink):
            left_ms = int((end - time.monotonic()) * 1000)
            if left_ms <= 0 or not sink.socket.poll(left_ms, zmq.POLLOUT):
                return False
        try:
            sink.socket.send_multipart(self._farewell, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
