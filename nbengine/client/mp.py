"""What the clients of an engine in other processes share: sockets, wire format, utility calls, life and death."""

from __future__ import annotations

import copy
import itertools
import logging
import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, cast

import zmq

from nbengine.client.base import EngineCoreClient
from nbengine.client.connection import ConnectionInfo
from nbengine.client.host_link import HostLink
from nbengine.errors import (
    EngineDeadError,
    EngineStartError,
    LeaseExpiredError,
    NBEngineError,
    UtilityError,
    WireError,
)
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    EngineReady,
    FinishReason,
    Progress,
    UtilityOutput,
    UtilityRequest,
    engine_identity,
)
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.ipc.sockets import make_socket
from nbengine.ipc.transport import bound_address
from nbengine.models.progress import ProgressCallback

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT = 30.0
"""Seconds that an engine core, once ready, may take to connect to this client."""

_Event = Progress | EngineReady | NBEngineError | None


class MPClient(EngineCoreClient):
    """Binds an input ROUTER and an output PULL in the engine's run directory and keeps a lease with its host.

    A subclass owns the thread that touches the two sockets: `_post` hands it what is to be sent, and it calls
    `_send`, `_on_input` and `_on_output`. The link calls the `on_…` methods on its own thread.
    """

    def __init__(
        self, info: ConnectionInfo, *, session: str | None = None, owns_engine: bool = False
    ) -> None:
        self.info = info
        self.config = info.config
        self.ready: EngineReady | None = None
        self._owns_engine = owns_engine
        self._error: NBEngineError | None = None
        self._is_dead = False
        self._closed = False
        self._client_index = 0
        self._ranks: list[int] = []
        self._connected: set[bytes] = set()
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._utilities: dict[int, Future[Any]] = {}
        self._call_ids = itertools.count()
        self._encoder = MsgpackEncoder()
        self._tensors: ShmTensorSender | None = None
        self._decoder: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)
        self._pending_messages: list[tuple[zmq.MessageTracker, object]] = []
        client_id = secrets.token_hex(4)
        self._context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        try:
            input_address = info.client_bind_address(f"c-{client_id}.in")
            output_address = info.client_bind_address(f"c-{client_id}.out")
            self._input_socket = make_socket(self._context, input_address, zmq.ROUTER, bind=True)
            # After a lost lease the engine core comes back under the same identity.
            self._input_socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._output_socket = make_socket(self._context, output_address, zmq.PULL, bind=True)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        addresses = (bound_address(self._input_socket), bound_address(self._output_socket))
        self.link = HostLink(info, session or secrets.token_hex(8), *addresses, self)

    @property
    def connection(self) -> ConnectionInfo:
        """Where the engine lives."""
        return self.info

    @property
    def engine_ranks(self) -> list[int]:
        """The engine cores that take requests now."""
        return list(self._ranks)

    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        """Wait for every engine core's READY and for its first message on the input socket."""
        ready: dict[int, EngineReady] = {}
        deadline: float | None = None
        while deadline is None or not self._all_connected():
            event = self._next_event(deadline)
            if isinstance(event, NBEngineError):
                raise event
            if isinstance(event, Progress) and progress is not None:
                progress(event)
            if isinstance(event, EngineReady):
                ready[event.rank] = event
            if deadline is None and self._ranks and set(self._ranks) <= ready.keys():
                deadline = time.monotonic() + CONNECT_TIMEOUT
        self.info.ready = [ready[rank] for rank in self._ranks]
        self.ready = self.info.ready[0]
        return self.ready

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to its engine core."""
        self.check_alive()
        request.client_index = self._client_index
        self._post(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Tell the engine core to drop requests; of no effect when it is dead."""
        request_ids = list(request_ids)
        if request_ids and self._error is None:
            self._post(EngineCoreRequestType.ABORT, request_ids)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Send a utility call; safe on any thread."""
        future: Future[Any] = Future()
        call_id = next(self._call_ids)
        self._utilities[call_id] = future
        if self._error is None:
            call = UtilityRequest(self._client_index, call_id, method, list(args))
            self._post(EngineCoreRequestType.UTILITY, call)
        # The engine may have died between the first look and the registration.
        if self._error is not None and self._utilities.pop(call_id, None) is not None:
            future.set_exception(copy.copy(self._error))
        return future

    def check_alive(self) -> None:
        """Raise what keeps the client from being used, if anything does."""
        if self._error is not None:
            # A copy: what was raised holds on to the caller's frames, and with them to the owner of this client.
            raise copy.copy(self._error)

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine, wait until nothing is left of it, and close this client; again does nothing."""
        if self._closed:
            return
        if self._is_dead:
            self.link.join()
        else:
            self.link.shutdown(drain=drain)
        self._fail(EngineDeadError("the engine was shut down"), dead=True)
        self.close()

    def detach(self) -> None:
        """Leave the engine running, give the lease back and close this client."""
        if self._closed:
            return
        self.link.detach()
        self._fail(EngineDeadError("this client has detached from the engine"), dead=True)
        self.close()

    def abandon(self) -> None:
        """Undo the construction of a client that did not get ready."""
        if self._owns_engine:
            self.shutdown()
        else:
            self.detach()

    def release(self) -> None:
        """End the engine if it is this client's and bound, else detach; does not wait and takes no lock."""
        if self._owns_engine and self.config.bound:
            self.link.request_shutdown()
        else:
            self.link.request_detach()
        self._request_close()

    def close(self) -> None:
        """Close the sockets and end the thread; leaves engine and lease alone."""
        self._closed = True
        self._close_sockets()

    # For subclasses.

    @abstractmethod
    def _post(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        """Have `_send` called on the thread of the sockets, in the order of the calls."""

    @abstractmethod
    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        """Pass outputs on to whoever processes them; called on the thread of the sockets."""

    @abstractmethod
    def _deliver_error(self, error: NBEngineError, *, dead: bool) -> None:
        """Tell whoever processes outputs that all requests have failed; called on any thread."""

    @abstractmethod
    def _request_close(self) -> None:
        """Have the sockets closed; does not wait and takes no lock."""

    @abstractmethod
    def _close_sockets(self) -> None:
        """Have the sockets closed and wait for it; calling it again does nothing."""

    def _send(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        if not self._ranks:
            # The lease was lost after this was posted, and with it every request.
            return
        self._pending_messages = [item for item in self._pending_messages if not item[0].done]
        try:
            frames = self._encoder.encode(payload)
        except WireError as error:
            self._refuse(payload, error)
            return
        message = (engine_identity(self._rank_for(payload)), request_type.value, *frames)
        if len(frames) == 1:
            self._input_socket.send_multipart(message)
            return
        # Tensors are sent from their own memory, which has to live until they are gone.
        tracker = self._input_socket.send_multipart(message, copy=False, track=True)
        self._pending_messages.append((cast("zmq.MessageTracker", tracker), payload))

    def _on_input(self, frames: Sequence[bytes]) -> None:
        """Take note of an engine core that has connected; it sends nothing else here."""
        self._connected.add(frames[0])
        self._on_usable()

    def _on_output(self, frames: Sequence[bytes]) -> None:
        if len(frames) == 1 and frames[0] == ENGINE_CORE_DEAD:
            self.link.core_died()
            return
        try:
            outputs = self._decoder.decode(frames)
        except WireError as error:
            logger.error("dropped outputs of engine %s: %s", self.info.name, error)
            return
        if outputs.utility_output is not None:
            self._on_utility_output(outputs.utility_output)
        else:
            self._deliver(outputs)

    # What the link tells, on its thread.

    def on_attached(self, client_index: int, engine_ranks: list[int], tensor_dir: str) -> None:
        """A lease is held."""
        self._client_index = client_index
        self._tensors = _tensor_sender(tensor_dir, client_index)
        self._encoder.oob_tensor_consumer = self._tensors
        self._ranks = engine_ranks
        self._on_usable()

    def on_news(self, news: Progress | EngineReady) -> None:
        """The start makes progress."""
        if self.ready is None:
            self._events.put(news)

    def on_lease_lost(self, error: LeaseExpiredError) -> None:
        """All requests are gone, the client itself goes on."""
        self._ranks = []
        self._connected.clear()
        self._fail(error, dead=False)

    def on_dead(self, error: EngineStartError | EngineDeadError) -> None:
        """The engine has ended."""
        self._fail(error, dead=True)
        self._events.put(error)

    # The rest.

    def _next_event(self, deadline: float | None) -> _Event:
        try:
            timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
            return self._events.get(timeout=timeout)
        except Empty:
            raise EngineStartError(
                f"engine {self.info.name} is ready but did not connect within {CONNECT_TIMEOUT:g} s"
            ) from None

    def _on_usable(self) -> None:
        """Called when the lease or a connection has come; a client that had lost its lease goes on with both."""
        if isinstance(self._error, LeaseExpiredError) and self._all_connected():
            self._error = None
        self._events.put(None)

    def _all_connected(self) -> bool:
        ranks = self._ranks
        return bool(ranks) and all(engine_identity(rank) in self._connected for rank in ranks)

    def _rank_for(self, payload: object) -> int:
        rank = payload.data_parallel_rank if isinstance(payload, EngineCoreRequest) else None
        return self._ranks[0] if rank is None else rank

    def _refuse(self, payload: object, error: WireError) -> None:
        if isinstance(payload, UtilityRequest):
            self._on_utility_output(UtilityOutput(payload.call_id, failure_message=str(error)))
        elif isinstance(payload, EngineCoreRequest):
            refusal = EngineCoreOutput(
                payload.request_id, [], finish_reason=FinishReason.ERROR, error=str(error)
            )
            self._deliver(EngineCoreOutputs(outputs=[refusal]))

    def _on_utility_output(self, output: UtilityOutput) -> None:
        future = self._utilities.pop(output.call_id, None)
        if future is None or not future.set_running_or_notify_cancel():
            return
        if output.failure_message is None:
            future.set_result(output.result)
        else:
            future.set_exception(UtilityError(output.failure_message))

    def _fail(self, error: NBEngineError, *, dead: bool) -> None:
        if self._is_dead:
            return
        self._error, self._is_dead = error, dead
        if self._tensors is not None:
            self._tensors.close()
        while self._utilities:
            _, future = self._utilities.popitem()
            if future.set_running_or_notify_cancel():
                future.set_exception(copy.copy(error))
        self._deliver_error(error, dead=dead)


def _tensor_sender(tensor_dir: str, client_index: int) -> ShmTensorSender | None:
    """The sender of large tensors, None where the engine takes none or its directory is out of reach."""
    if not tensor_dir:
        return None
    try:
        return ShmTensorSender(tensor_dir, client_index)
    except NBEngineError as error:
        logger.info("tensors go through the sockets: %s", error)
        return None
