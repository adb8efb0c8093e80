"""The engine core's input thread: sockets on one side, queues of the busy loop on the other.

The thread decodes and preprocesses while the busy loop waits for the model. Whatever a client sends, the
worst result is an error as the answer to that client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import zmq

from nbengine.engine.core.connections import Connections
from nbengine.engine.core.work import (
    AbortRequests,
    AbortsQueue,
    AddRequest,
    InputQueue,
    OutputQueue,
    StartWave,
    ThreadFailed,
    refusal,
)
from nbengine.errors import NBEngineError, WireError
from nbengine.ipc.control_messages import (
    AttachClient,
    ChangeGroup,
    ClientLost,
    CoreToHost,
    DetachClient,
    HostToCore,
    ShutdownEngine,
    WantEvents,
)
from nbengine.ipc.handshake import ControlDecoder, encode_control
from nbengine.ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
    UtilityRequest,
    encode_announcement,
    engine_identity,
)
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.serial import MsgpackDecoder
from nbengine.ipc.shm_tensors import ShmTensorReceiver
from nbengine.ipc.shortage import Setbacks, is_shortage
from nbengine.ipc.sockets import make_socket
from nbengine.scheduler.request import Request

logger = logging.getLogger(__name__)

STOP_ADDRESS = "inproc://stop-input"

Preprocess = Callable[[EngineCoreRequest], tuple[Request, int]]


class InputThread(threading.Thread):
    """The thread that reads the control socket and every client's DEALER. It owns `control` while it runs.

    One other thread may call `stop`, which ends this one, and `tell_host`. Clients may leave tensors in
    `tensor_dir`, if there is one. Cores in lock step hear of waves at `wave_address`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        control: zmq.Socket[bytes],
        rank: int,
        preprocess: Preprocess,
        input_queue: InputQueue,
        aborts_queue: AbortsQueue,
        output_queue: OutputQueue,
        interrupt: Callable[[], None],
        tensor_dir: str = "",
        incarnation: int = 0,
        wave_address: str = "",
    ) -> None:
        super().__init__(name="nbengine-input", daemon=True)
        self._context = context
        self._control = control
        self._rank = rank
        self._incarnation = incarnation
        self._preprocess = preprocess
        self._interrupt = interrupt
        self._input_queue = input_queue
        self._aborts_queue = aborts_queue
        self._output_queue = output_queue
        self._waves = _subscribe_to_waves(context, wave_address) if wave_address else None
        self._stopper = make_socket(context, STOP_ADDRESS, zmq.PAIR, bind=True)
        try:
            # Made here and not on the thread, which would be deaf without it: without a descriptor no core
            # starts.
            self._stop_signal = make_socket(context, STOP_ADDRESS, zmq.PAIR, bind=False)
        except NBEngineError:
            self._stopper.close()
            raise
        self._poller = zmq.Poller()
        self._client_of: dict[zmq.Socket[bytes], int] = {}
        self._stopped = False
        self._setbacks = Setbacks(logger, "the input thread falters")
        self._to_attach: dict[int, AttachClient] = {}
        """Clients for which there was no file descriptor yet, by index."""
        self._attach_at = 0.0
        self.connections = Connections(context, self._poller)
        self._control_decoder: ControlDecoder[HostToCore] = ControlDecoder(HostToCore)
        tensors = ShmTensorReceiver(tensor_dir) if tensor_dir else None
        self._add_decoder: MsgpackDecoder[EngineCoreRequest] = MsgpackDecoder(EngineCoreRequest, tensors)
        self._abort_decoder: MsgpackDecoder[list[str]] = MsgpackDecoder(list[str])
        self._utility_decoder: MsgpackDecoder[UtilityRequest] = MsgpackDecoder(UtilityRequest, tensors)
        self._any_decoder: MsgpackDecoder[Any] = MsgpackDecoder(Any, tensors)
        self._wave_decoder: MsgpackDecoder[tuple[int, int]] = MsgpackDecoder(tuple[int, int])
        self._peer_log = PeerLog(logger)

    def tell_host(self, message: CoreToHost) -> None:
        """Send a message to the host on the control socket, after `start`."""
        self._stopper.send(encode_control(message))

    def stop(self) -> None:
        """End the thread and wait for it; then the control socket belongs to the caller again."""
        if self.ident is not None:
            self._stopper.send(b"")
            self.join()
        else:
            self._stop_signal.close()
        self._stopper.close()
        if self._waves is not None:
            self._waves.close()

    def run(self) -> None:
        """Read messages until `stop`."""
        stop = self._stop_signal
        try:
            self._process_input_sockets(stop)
        except Exception as error:
            logger.exception("the input thread failed")
            self._input_queue.put(ThreadFailed(self.name, error))
            # The control socket stays this thread's until `stop`; nothing more is told to the host.
            while stop.recv():
                pass
        finally:
            self.connections.stop()
            for socket in (stop, *self._client_of):
                socket.close()

    def _process_input_sockets(self, stop: zmq.Socket[bytes]) -> None:
        for socket in (stop, self._control, self._waves):
            if socket is not None:
                self._poller.register(socket, zmq.POLLIN)
        self.connections.watch_host(self._control, self._waves)
        while not self._stopped:
            try:
                self._turn(stop)
            except (OSError, zmq.ZMQError) as error:
                time.sleep(self._setbacks.note(error))

    def _turn(self, stop: zmq.Socket[bytes]) -> None:
        """Read the messages that are there; after a shortage, a later turn reads the rest."""
        for socket, _ in cast("list[tuple[zmq.Socket[bytes], int]]", self._poller.poll(self._patience_ms())):
            if socket is stop:
                message = stop.recv()
                if not message:
                    self._stopped = True
                    return
                # Other threads hand over their words for the host, because only this one may use its socket.
                self._control.send(message)
            elif socket is self._control:
                self._on_control(socket.recv())
            elif socket is self._waves:
                self._on_wave(socket.recv_multipart())
            # A client may have been detached since the poll.
            elif (client_index := self._client_of.get(socket)) is not None:
                self._on_client(client_index, socket.recv_multipart(copy=False))
            elif (lost := self.connections.look(socket)) is not None:
                self._peer_log.warn_of(lost, "a connection to client %d broke", lost)
                self._control.send(encode_control(ClientLost(lost)))
        # Steps that are computed at once do not keep the busy loop from what has come.
        self._interrupt()
        if self._to_attach and time.monotonic() >= self._attach_at:
            clients, self._to_attach = self._to_attach, {}
            for client in clients.values():
                self._attach(client)

    def _patience_ms(self) -> int | None:
        return max(1, int(1000 * (self._attach_at - time.monotonic()))) if self._to_attach else None

    def _on_control(self, frame: bytes) -> None:
        try:
            message = self._control_decoder.decode(frame)
        except WireError as error:
            self._peer_log.warn_of("host", "dropped a control message: %s", error)
            return
        match message:
            case AttachClient():
                self._attach(message)
            case DetachClient(client_index):
                self._detach(client_index)
                self._aborts_queue.put((client_index, None, ()))
                self._input_queue.put(message)
            case WantEvents() | ShutdownEngine() | ChangeGroup():
                self._input_queue.put(message)
            case _:
                name = type(message).__name__
                self._peer_log.warn_of("host", "dropped a %s that came after the handshake", name)

    def _on_wave(self, frames: list[bytes]) -> None:
        try:
            wave, exclude_rank = self._wave_decoder.decode(frames[1:])
        except WireError as error:
            self._peer_log.warn_of("coordinator", "dropped a message of the coordinator: %s", error)
            return
        if exclude_rank != self._rank:
            self._input_queue.put(StartWave(wave))

    def _attach(self, client: AttachClient) -> None:
        socket: zmq.Socket[bytes] | None = None
        try:
            socket = make_socket(
                self._context,
                client.input_address,
                zmq.DEALER,
                bind=False,
                identity=engine_identity(self._rank, client.secret),
            )
            self.connections.watch_outputs(client)
            self.connections.watch_inputs(client, socket)
        except (NBEngineError, zmq.ZMQError) as error:
            self.connections.cancel(client.client_index)
            if socket is not None:
                socket.close()
            self._attach_later(client, error)
            return
        # The output thread knows the client before the announcement lets its first request come.
        self._output_queue.put(client)
        # With this greeting the client knows that it has accepted the connection of its outputs, too.
        self._output_queue.put((client.client_index, EngineCoreOutputs()))
        # A ROUTER can send to a peer only after it has heard from it.
        socket.send(encode_announcement(client.client_index, self._incarnation))
        self._client_of[socket] = client.client_index
        self._poller.register(socket, zmq.POLLIN)
        logger.info("client %d attached", client.client_index)

    def _attach_later(self, client: AttachClient, error: Exception) -> None:
        if not is_shortage(error):
            index = client.client_index
            self._peer_log.warn_of(index, "client %d cannot be attached: %s", index, error)
            return
        self._to_attach[client.client_index] = client
        self._attach_at = time.monotonic() + self._setbacks.note(error)

    def _detach(self, client_index: int) -> None:
        self._to_attach.pop(client_index, None)
        self.connections.forget(client_index)
        for socket, index in list(self._client_of.items()):
            if index == client_index:
                self._poller.unregister(socket)
                del self._client_of[socket]
                socket.close()
        logger.info("client %d detached", client_index)

    def _on_client(self, client_index: int, frames: list[zmq.Frame]) -> None:
        request_type = None
        try:
            request_type = _request_type(frames[0])
            self._on_request(client_index, request_type, frames[1:])
        except WireError as error:
            message = "client %d sent what is no request: %s"
            self._peer_log.warn_of(client_index, message, client_index, error)
            self._answer_undecodable(client_index, request_type, frames[1:], str(error))

    def _on_request(
        self, client_index: int, request_type: EngineCoreRequestType, frames: list[zmq.Frame]
    ) -> None:
        match request_type:
            case EngineCoreRequestType.ADD:
                self._add(client_index, self._add_decoder.decode(frames))
            case EngineCoreRequestType.ABORT:
                request_ids = self._abort_decoder.decode(frames[:1])
                stopped = tuple(self._abort_decoder.decode(frames[1:])) if len(frames) > 1 else ()
                # Put eagerly for a running step, and in order for a request still in the input queue.
                self._aborts_queue.put((client_index, request_ids, stopped))
                self._input_queue.put(AbortRequests(client_index, request_ids, stopped))
            case EngineCoreRequestType.UTILITY:
                call = self._utility_decoder.decode(frames)
                call.client_index = client_index
                self._input_queue.put(call)
            case _:
                raise WireError(f"{request_type.name} does not come from a client")

    def _add(self, client_index: int, request: EngineCoreRequest) -> None:
        # The socket says whose request it is, whatever the message claims.
        request.client_index = client_index
        try:
            prepared, wave = self._preprocess(request)
        except Exception as error:  # noqa: BLE001 (it is the answer)
            if not isinstance(error, NBEngineError):
                message = "request %s cannot be preprocessed"
                self._peer_log.warn_of(client_index, message, request.request_id, exc_info=error)
            self._output_queue.put(refusal(client_index, request.request_id, error))
            return
        self._input_queue.put(AddRequest(prepared, wave))

    def _answer_undecodable(
        self,
        client_index: int,
        request_type: EngineCoreRequestType | None,
        frames: list[zmq.Frame],
        reason: str,
    ) -> None:
        """Tell the client which of its requests was lost, if that much can be read."""
        try:
            fields = self._any_decoder.decode_without_tensors(frames)
        except WireError:
            # It has been logged, and there is nothing to answer to.
            return
        if not isinstance(fields, list):
            return
        if request_type is EngineCoreRequestType.ADD and fields and isinstance(fields[0], str):
            self._output_queue.put(refusal(client_index, fields[0], WireError(reason)))
        elif request_type is EngineCoreRequestType.UTILITY and len(fields) > 1 and type(fields[1]) is int:
            answer = UtilityOutput(fields[1], failure_message=reason)
            self._output_queue.put((client_index, EngineCoreOutputs(utility_output=answer)))


def _subscribe_to_waves(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    topic = EngineCoreRequestType.START_DP_WAVE.value
    return make_socket(context, address, zmq.SUB, bind=False, options={zmq.SUBSCRIBE: topic})


def _request_type(frame: zmq.Frame) -> EngineCoreRequestType:
    try:
        return EngineCoreRequestType(frame.bytes)
    except ValueError:
        raise WireError(f"no request type {frame.bytes[:16]!r}") from None
