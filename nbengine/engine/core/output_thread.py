"""The engine core's output thread: a queue of the busy loop on one side, sockets on the other.

The thread encodes and sends while the busy loop waits for the model. A client that is slow or gone can
neither block it nor make it hold more than a bounded number of bytes.
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
from nbengine.engine.core.backlog import Backlog, EncodedAnswer
from nbengine.engine.core.connections import output_watch_name
from nbengine.engine.core.work import (
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
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.serial import MsgpackEncoder
from nbengine.ipc.shortage import Setbacks, is_shortage, persist
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import is_tcp
from nbengine.kv_cache.events import KVCacheSnapshot, KVEventBatch, KVMessage
from nbengine.metrics.trace import TraceBatch, TraceMessage, TraceSnapshot
from nbengine.units import size

logger = logging.getLogger(__name__)

OUTPUT_HWM = 64
"""Most messages on their way to one client; later outputs are merged until there is room."""
COORDINATOR_HWM = 1000
"""Most messages on their way to the coordinator; of later statistics the newest are kept."""
MAX_LARGE_BYTES = 4 << 20
"""Bytes of large messages on their way to one client from which on later outputs are merged, too."""
FIRST_RETRY = 0.0005
"""Seconds until the first look at a client that did not read: after a burst there is soon room again."""
RETRY_INTERVAL = 0.01
"""Most seconds between two looks at clients that still do not read; each pause is twice the one before, up to
this."""
COORDINATOR_TIMEOUT = 60.0
"""Seconds for which a connection to the coordinator is tried again while descriptors are short."""
PATIENCE = 0.5
"""Seconds that the last messages may take to leave."""


class _Sink:
    """One client's socket, and the outputs for which it has no room."""

    def __init__(self, socket: zmq.Socket[bytes] | None, secret: bytes = b"") -> None:
        self.socket = socket
        """None while there is no file descriptor for it; everything then waits in the backlog."""
        self.secret = secret
        self.connect_at = 0.0
        """Time of the next attempt to connect, on the monotonic clock."""
        self.backlog = Backlog()
        self._in_flight: deque[tuple[zmq.MessageTracker, bytearray | None, int]] = deque()
        self._large_bytes = 0

    def has_room(self) -> bool:
        """Tell whether the large messages that ZMQ still holds leave room for more."""
        return self._large_bytes < MAX_LARGE_BYTES

    def hold(self, tracker: zmq.MessageTracker, buffer: bytearray | None, num_bytes: int) -> None:
        """Remember a message that ZMQ still sends without a copy, so that `buffer` is in use."""
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
    """The thread that encodes and sends what the busy loop and the input thread put into `output_queue`.

    A client's outputs that ZMQ does not take wait in its `Backlog`. When that exceeds `backlog_limit` bytes,
    its contents are dropped and all requests of the client end with an error that says so.

    However the thread ends, the last message that every client gets is ENGINE_CORE_DEAD.
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
        self._setbacks = Setbacks(logger, "a client cannot be connected to for its outputs")
        self._late: dict[int, AttachClient] = {}
        """Clients whose sinks have no socket yet, by index."""
        self._encoder = MsgpackEncoder()
        self._peer_log = PeerLog(logger)
        self._reuse_buffers: list[bytearray] = []

    def run(self) -> None:
        """Send items until ENGINE_CORE_DEAD comes out of the queue."""
        try:
            self._connect_to_coordinator()
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
        """Return the next item, None if there is none and it is time to look at clients that are behind."""
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
            tracker = _send_frames(sink, frames)
        except zmq.Again:
            tracker = None
        if tracker is not None and not tracker.done:
            sink.hold(tracker, buffer, sum(len(frame) for frame in frames))
        # No more spare buffers are kept than one for each sink and one more.
        elif len(self._reuse_buffers) <= len(self._sinks):
            self._reuse_buffers.append(buffer)
        return tracker is not None

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
        # A host that does not read loses the message, and the subscribers see the gap.
        with contextlib.suppress(zmq.Again):
            frames = [topic, *self._encoder.encode(message)]
            socket = self._sinks[COORDINATOR_INDEX].socket
            if socket is not None:
                socket.send_multipart(cast("Any", frames), flags=zmq.NOBLOCK)

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
        """Send as much to the clients that are behind as they take."""
        self._retry_after = min(2 * self._retry_after, RETRY_INTERVAL)
        self._retry_at = time.monotonic() + self._retry_after
        for client in list(self._late.values()):
            self._attach(client)
        for client_index in sorted(self._behind):
            if self._flush(self._sinks[client_index]):
                self._behind.discard(client_index)

    def _flush(self, sink: _Sink) -> bool:
        """Send from the backlog while there is room; return whether it is empty."""
        if sink.socket is None:
            return False
        while sink.backlog:
            sink.reclaim()
            if not (sink.has_room() and sink.socket.poll(0, zmq.POLLOUT)):
                return False
            item = sink.backlog.pop()
            frames = item.frames if isinstance(item, EncodedAnswer) else self._encode_merged(item)
            tracker = _send_frames(sink, frames)
            if not tracker.done:
                sink.hold(tracker, None, sum(len(frame) for frame in frames))
        return True

    def _encode_merged(self, outputs: EngineCoreOutputs) -> list[Any]:
        self._sign(outputs)
        return list(self._encoder.encode(outputs))

    def _give_up(self, client_index: int, sink: _Sink) -> None:
        reason = (
            f"the client did not read its outputs, and more than {size(self._backlog_limit)} of them "
            f"were waiting (client_backlog_bytes={self._backlog_limit})"
        )
        self._peer_log.warn_of(client_index, "client %d is given up: %s", client_index, reason)
        for answer in sink.backlog.give_up(reason):
            outputs = EngineCoreOutputs(utility_output=answer)
            self._sign(outputs)
            sink.backlog.add_answer(answer.call_id, self._encoder.encode(outputs))
        if sink.backlog.num_bytes <= self._backlog_limit:
            self._input_queue.put(GiveUpClient(client_index, reason))
            return
        # Even the errors alone exceed the limit.
        self._detach(client_index)
        self._input_queue.put(AbortRequests(client_index, None))

    # Clients that come and go.

    def _connect(self, address: str, hwm: int = OUTPUT_HWM, secret: bytes = b"") -> _Sink:
        return _Sink(make_socket(self._context, address, zmq.PUSH, bind=False, send_hwm=hwm), secret)

    def _connect_to_coordinator(self) -> None:
        def connect() -> None:
            self._sinks[COORDINATOR_INDEX] = self._connect(self._coordinator_output, COORDINATOR_HWM)

        setbacks = Setbacks(logger, "the coordinator cannot be connected to")
        if not persist(connect, setbacks, COORDINATOR_TIMEOUT):
            # Without it nobody would see what the core does; the last attempt says why.
            connect()

    def _attach(self, client: AttachClient) -> None:
        index = client.client_index
        sink = self._sinks.get(index)
        if sink is not None and time.monotonic() < sink.connect_at:
            return
        try:
            connected = self._connect(client.output_address, secret=client.secret)
            if is_tcp(client.output_address):
                self._announce(connected, index)
        except (NBEngineError, zmq.ZMQError) as error:
            if is_shortage(error):
                self._attach_later(client, self._setbacks.note(error))
            else:
                self._peer_log.warn_of(index, "no outputs for client %d: %s", index, error)
            return
        # A late client keeps its sink, whose backlog has what came in the meantime.
        if self._late.pop(index, None) is None:
            self._sinks[index] = connected
        else:
            self._sinks[index].socket = connected.socket

    def _attach_later(self, client: AttachClient, pause: float) -> None:
        """Treat a client to which no connection can be made now as one that does not read."""
        index = client.client_index
        sink = self._sinks.setdefault(index, _Sink(None, client.secret))
        sink.connect_at = time.monotonic() + pause
        self._late[index] = client
        self._behind.add(index)

    def _announce(self, sink: _Sink, client_index: int) -> None:
        if sink.socket is None:
            return
        try:
            ConnectionWatch.announce(sink.socket, output_watch_name(client_index))
        except zmq.ZMQError:
            sink.socket.close()
            raise

    def _detach(self, client_index: int) -> None:
        self._behind.discard(client_index)
        self._late.pop(client_index, None)
        sink = self._sinks.pop(client_index, None)
        if sink is not None and sink.socket is not None:
            ConnectionWatch.withdraw(sink.socket)
            sink.socket.close()

    def _send_engine_dead(self) -> None:
        end = time.monotonic() + self.patience
        # Clients that are behind come last, so that the others need not wait for them.
        for client_index, sink in sorted(self._sinks.items(), key=lambda item: item[0] in self._behind):
            if client_index != COORDINATOR_INDEX and not self._send_last(sink, end):
                logger.warning("client %d cannot be told of the end", client_index)
            if sink.socket is not None:
                ConnectionWatch.withdraw(sink.socket)
                sink.socket.close(linger=int(1000 * self.patience))

    def _send_last(self, sink: _Sink, end: float) -> bool:
        """Send the backlog and ENGINE_CORE_DEAD to a client; return whether it took them before `end`."""
        if sink.socket is None:
            return False
        while not self._flush(sink):
            left_ms = int((end - time.monotonic()) * 1000)
            if left_ms <= 0 or not sink.socket.poll(left_ms, zmq.POLLOUT):
                return False
        try:
            identity = engine_identity(self._engine_index, sink.secret)
            farewell = [ENGINE_CORE_DEAD, identity, encode_incarnation(self._incarnation)]
            sink.socket.send_multipart(farewell, flags=zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True


def _send_frames(sink: _Sink, frames: list[Any]) -> zmq.MessageTracker:
    if sink.socket is None:
        raise zmq.Again
    tracker = sink.socket.send_multipart(cast("Any", frames), flags=zmq.NOBLOCK, copy=False, track=True)
    return cast("zmq.MessageTracker", tracker)
