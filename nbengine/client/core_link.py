"""A client's connections to the engine cores: requests and calls out, outputs in, and the coordinator's statistics."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import zmq

from nbengine.client.connection import ConnectionInfo
from nbengine.client.request_router import RequestRouter
from nbengine.client.stats_feed import StatsFeed
from nbengine.client.utility_calls import UtilityCalls
from nbengine.errors import NBEngineError, RequestLostError, WireError
from nbengine.ipc.control_messages import EngineLost, EngineReady
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityRequest,
    decode_home,
    engine_identity,
)
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.ipc.sockets import MAX_BULK_BYTES, MAX_CONTROL_BYTES, make_socket
from nbengine.ipc.transport import bound_address

logger = logging.getLogger(__name__)

FramesHandler = Callable[[Sequence[bytes]], None]


class CoreLinkOwner(Protocol):
    """The client whose thread reads the sockets."""

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Outputs of requests that are in flight."""

    def on_farewell(self, rank: int) -> None:
        """A core has said good-bye."""

    def on_usable(self) -> None:
        """The ranks that take requests have changed."""

    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for what comes on a socket from now on."""

    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`; the socket is about to be closed."""

    def on_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Something was sent on a socket that is also read."""


class CoreLink:
    """Binds an input ROUTER and an output PULL in the engine's run directory, which every engine core connects to.

    A `RequestRouter` says which core gets a request; there may be more or fewer of them at any time. While there are
    several, or one in lock step, the coordinator's statistics are followed.

    For the thread of the sockets, but for `calls.begin` and `calls.fail`.
    """

    def __init__(self, info: ConnectionInfo, owner: CoreLinkOwner, data_parallel_rank: int | None) -> None:
        self.info = info
        self.client_index = 0
        """Of the lease under which the cores are connected."""
        self.calls = UtilityCalls()
        client_id = secrets.token_bytes(4)
        self.router = RequestRouter(
            info.config, bound_rank=data_parallel_rank, start=int.from_bytes(client_id)
        )
        self._owner = owner
        self._encoder = MsgpackEncoder()
        self._decoder: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)
        self._tensors: ShmTensorSender | None = None
        self._pending_messages: list[tuple[zmq.MessageTracker, object]] = []
        self._feed: StatsFeed | None = None
        self._when_all_usable: list[Callable[[], None]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        try:
            input_address = info.client_bind_address(f"c-{client_id.hex()}.in")
            output_address = info.client_bind_address(f"c-{client_id.hex()}.out")
            self._input = make_socket(
                self._context, input_address, zmq.ROUTER, bind=True, max_frame_bytes=MAX_CONTROL_BYTES
            )
            # After a lost lease, and after a restart, an engine core comes back under the same identity.
            self._input.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._output = make_socket(
                self._context, output_address, zmq.PULL, bind=True, max_frame_bytes=MAX_BULK_BYTES
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.addresses = bound_address(self._input), bound_address(self._output)
        """Where engine cores connect for input and output."""

    def open(self) -> None:
        """Begin to read, on the thread that this is for."""
        self._owner.watch(self._output, self._on_output)
        self._owner.watch(self._input, self._on_input)

    def close(self) -> None:
        """Close the sockets; what comes after that is dropped."""
        if not self._input.closed:
            self._close_feed()
            for socket in (self._output, self._input):
                self._owner.unwatch(socket)
                socket.close()
            self._context.term()

    # What the client wants.

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that the router chooses, as soon as it takes requests."""
        feed = self._feed
        if feed is not None:
            request.current_wave = feed.newest.current_wave
        try:
            rank = self.router.route(request)
        except RequestLostError as error:
            self._fail([request.request_id], error.rank, str(error))
            return
        if rank is None:
            return
        try:
            self._send(rank, EngineCoreRequestType.ADD, request)
        except WireError as error:
            self.router.abort([request.request_id])
            self._fail([request.request_id], None, str(error))
            return
        if feed is not None and self.info.config.lock_step:
            feed.request_sent(rank, request.current_wave)
            self._owner.on_sent(feed.socket)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Have requests dropped by the cores that have them."""
        for rank, ids in self.router.abort(request_ids).items():
            self._send(rank, EngineCoreRequestType.ABORT, ids)

    def call(self, call_id: int) -> None:
        """Send a registered utility call."""
        ranks = list(self.router.table.usable)
        self._send_calls(self.calls.address(call_id, ranks, self.client_index))

    # What the host tells.

    def on_attached(
        self, client_index: int, engine_ranks: list[int], tensors: ShmTensorSender | None
    ) -> None:
        """A lease is held."""
        self.client_index = client_index
        self._tensors = tensors
        self._encoder.oob_tensor_consumer = tensors
        self.set_ranks(engine_ranks)

    def when_all_usable(self, function: Callable[[], None]) -> None:
        """Call a function once all ranks that the host has listed take requests: at once if they do."""
        self._when_all_usable.append(function)
        self._tell_those_who_wait()

    def on_detached(self) -> None:
        """The lease is lost, and every request with it."""
        self.router.clear()

    def set_ranks(self, engine_ranks: list[int]) -> None:
        """Requests may go to these ranks."""
        self.router.table.set_ranks(engine_ranks)
        self._on_ranks_changed()

    def on_ready(self, ready: EngineReady) -> None:
        """A core takes requests once it has connected."""
        self.router.on_ready(ready)
        self._on_ranks_changed()

    def on_lost(self, lost: EngineLost) -> None:
        """A core has ended. What it has sent before that still counts."""
        while self._output.poll(0):
            self._on_output(self._output.recv_multipart())
        home = (lost.rank, lost.incarnation)
        self.router.table.on_lost(*home, restarting=lost.restarting)
        self.calls.lose(lost.rank, lost.cause)
        begun = self.router.take_begun(home)
        self._fail(begun, lost.rank, f"engine core {lost.rank} ended while it worked on it: {lost.cause}")
        self._on_ranks_changed()

    # What the cores and the coordinator send.

    def _on_input(self, frames: Sequence[bytes]) -> None:
        """Take note of an engine core that has connected; it sends nothing else here."""
        try:
            home = decode_home(frames[0], frames[-1])
        except WireError as error:
            logger.warning("dropped a message of a peer of engine %s: %s", self.info.name, error)
            return
        self.router.table.on_connected(*home)
        self._on_ranks_changed()

    def _on_output(self, frames: Sequence[bytes]) -> None:
        try:
            if frames[0] == ENGINE_CORE_DEAD:
                self._on_farewell(*decode_home(*frames[1:3]))
                return
            outputs = self._decoder.decode(frames)
        except (WireError, TypeError) as error:
            logger.error("dropped outputs of engine %s: %s", self.info.name, error)
            return
        if outputs.utility_output is not None:
            self._send_calls(self.calls.answer(outputs.engine_index, outputs.utility_output))
            return
        self.router.take_in(outputs)
        if outputs.outputs or outputs.finished_requests:
            self._owner.on_outputs(outputs)
        if outputs.returned:
            self._on_returned(outputs.returned, (outputs.engine_index, outputs.incarnation))

    def _on_farewell(self, rank: int, incarnation: int) -> None:
        self._owner.on_farewell(rank)
        self.router.table.on_farewell(rank, incarnation)
        self._on_ranks_changed()

    def _on_returned(self, request_ids: list[str], home: tuple[int, int]) -> None:
        self.router.table.on_returned(*home)
        self.router.update()
        for request in self.router.take_back(request_ids, home):
            self.add(request)

    def _on_stats(self, frames: Sequence[bytes]) -> None:
        stats = None if self._feed is None else self._feed.read(frames)
        if stats is not None:
            self.router.balancer.observe(stats)

    # The rest.

    def _on_ranks_changed(self) -> None:
        """Send what waits, and what departed cores will not answer, to those that take requests now."""
        router = self.router
        router.update()
        self._follow_stats()
        self._owner.on_usable()
        self._tell_those_who_wait()
        for home in router.table.departed():
            for request in router.take_unbegun(home):
                self.add(request)
            router.table.forget(home)
        for request in router.take_waiting():
            self.add(request)

    def _tell_those_who_wait(self) -> None:
        if self.router.table.all_usable:
            functions, self._when_all_usable = self._when_all_usable, []
            for function in functions:
                function()

    def _follow_stats(self) -> None:
        config, router = self.info.config, self.router
        wanted = config.lock_step or (len(router.table.ranks) > 1 and router.bound_rank is None)
        if wanted and self._feed is None:
            self._feed = StatsFeed(self._context, self.info)
            self._owner.watch(self._feed.socket, self._on_stats)
        elif not wanted:
            self._close_feed()

    def _close_feed(self) -> None:
        if self._feed is not None:
            self._owner.unwatch(self._feed.socket)
            self._feed.close()
            self._feed = None

    def _send_calls(self, calls: Iterable[tuple[int, UtilityRequest]]) -> None:
        for rank, request in calls:
            try:
                self._send(rank, EngineCoreRequestType.UTILITY, request)
            except WireError as error:
                self.calls.refuse(request.call_id, str(error))

    def _send(self, rank: int, request_type: EngineCoreRequestType, payload: Any) -> None:
        """Encode and send.

        Raises:
            WireError: the payload cannot be encoded.
        """
        if self._input.closed:
            return
        self._pending_messages = [item for item in self._pending_messages if not item[0].done]
        frames = self._encoder.encode(payload)
        message = (engine_identity(rank), request_type.value, *frames)
        if len(frames) == 1:
            self._input.send_multipart(message)
        else:
            # Tensors are sent from their own memory, which has to live until they are gone.
            tracker = self._input.send_multipart(message, copy=False, track=True)
            self._pending_messages.append((cast("zmq.MessageTracker", tracker), payload))
        self._owner.on_sent(self._input)

    def _fail(self, request_ids: list[str], lost_rank: int | None, reason: str) -> None:
        """End requests with an error, for their callers alone."""
        failures = [
            EngineCoreOutput(
                request_id, [], finish_reason=FinishReason.ERROR, error=reason, lost_rank=lost_rank
            )
            for request_id in request_ids
        ]
        if failures:
            self._owner.on_outputs(EngineCoreOutputs(outputs=failures))


def tensor_sender(tensor_dir: str, client_index: int) -> ShmTensorSender | None:
    """The sender of large tensors, None where the engine takes none or its directory is out of reach."""
    if not tensor_dir:
        return None
    try:
        return ShmTensorSender(tensor_dir, client_index)
    except NBEngineError as error:
        logger.info("tensors go through the sockets: %s", error)
        return None
