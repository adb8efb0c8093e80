"""A client's connections to the engine cores, for requests, calls and outputs,
and to the coordinator's statistics."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, cast

import zmq

from nbengine.client.observe.stats_feed import StatsFeed
from nbengine.client.routing.request_router import RequestRouter
from nbengine.client.threads.socket_thread import SocketThread
from nbengine.client.utility_calls import UtilityCalls
from nbengine.errors import NBEngineError, RequestLostError, WireError
from nbengine.ipc.control_messages import EngineLost, EngineReady, Scaled
from nbengine.ipc.messages import (
    ENGINE_CORE_DEAD,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityRequest,
    decode_announcement,
    decode_home,
    engine_identity,
    new_secret,
)
from nbengine.ipc.peer_log import PeerLog
from nbengine.ipc.serial import MsgpackDecoder, MsgpackEncoder
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.ipc.shortage import Setbacks
from nbengine.ipc.sockets import MAX_BULK_BYTES, MAX_WORD_BYTES, make_socket
from nbengine.ipc.transport import bound_address
from nbengine.runtime.connection import ConnectionInfo

if TYPE_CHECKING:
    from nbengine.ipc.serial import Buffer

logger = logging.getLogger(__name__)

ANNOUNCEMENT_HWM = 16
"""The most messages of one peer that wait to be read on the input;
an engine core sends a single one there."""


class OutputConsumer(Protocol):
    """The consumer of what the engine cores return."""

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Take in outputs of requests that are in flight; called on the thread of the sockets."""

    def on_error(self, error: NBEngineError, *, dead: bool, client_index: int) -> None:
        """Fail all requests; called on any thread.

        Args:
            dead: the engine has ended for this client.
            client_index: the number of the lease under which they were sent.
        """


class CoreListener(Protocol):
    """The client of a `CoreLink`. Its methods are called on the thread of the sockets."""

    def on_farewell(self, rank: int, incarnation: int) -> None:
        """Take note that a core has said good-bye."""

    def on_usable(self) -> None:
        """Take note that other ranks take requests."""


class CoreLink:
    """An input ROUTER and an output PULL in the engine's run directory, to which every engine core connects.

    A `RequestRouter` chooses the core that gets a request; cores may come and go at any time. With several of
    them, or one in lock step, the coordinator's statistics are followed.

    It is for the thread of the sockets, except `calls.begin` and `calls.fail`.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        thread: SocketThread,
        consumer: OutputConsumer,
        listener: CoreListener,
        data_parallel_rank: int | None,
    ) -> None:
        self.info = info
        self.client_index = 0
        """The number of the lease under which the cores are connected."""
        self.calls = UtilityCalls()
        client_id = secrets.token_bytes(4)
        self.router = RequestRouter(
            info.config, bound_rank=data_parallel_rank, start=int.from_bytes(client_id)
        )
        self._thread = thread
        self._consumer = consumer
        self._listener = listener
        self._encoder = MsgpackEncoder()
        self._decoder: MsgpackDecoder[EngineCoreOutputs] = MsgpackDecoder(EngineCoreOutputs)
        self._tensors: ShmTensorSender | None = None
        self._pending_messages: list[tuple[zmq.MessageTracker, object]] = []
        self._feed: StatsFeed | None = None
        self._lacks_feed = False
        """The statistics are to be followed, and no descriptor was left for it yet."""
        self._feed_setbacks = Setbacks(logger, f"the statistics of engine {info.name} are not followed")
        self._feed_at = 0.0
        self._peer_log = PeerLog(logger)
        self._scaled: list[tuple[Future[int], int]] = []
        """The calls of `scale` whose engine cores all run, and are not all connected to this client."""
        self._context: zmq.Context[zmq.Socket[bytes]] = info.make_context()
        try:
            input_address = info.client_bind_address(f"c-{client_id.hex()}.in")
            output_address = info.client_bind_address(f"c-{client_id.hex()}.out")
            self._input = make_socket(
                self._context,
                input_address,
                zmq.ROUTER,
                bind=True,
                receive_hwm=ANNOUNCEMENT_HWM,
                max_frame_bytes=MAX_WORD_BYTES,
            )
            # After a lost lease, and after a restart, an engine core comes back under the same identity,
            # which no other peer knows.
            self._input.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._output = make_socket(
                self._context, output_address, zmq.PULL, bind=True, max_frame_bytes=MAX_BULK_BYTES
            )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.addresses = bound_address(self._input), bound_address(self._output)
        """The addresses at which engine cores connect for input and output."""
        self.secret = new_secret()
        """The secret in the engine cores' identities at these addresses: `engine_identity`."""

    def open(self) -> None:
        """Begin to read; called on the thread of the sockets."""
        self._thread.watch(self._output, self._on_output)
        self._thread.watch(self._input, self._on_input)

    def close(self) -> None:
        """Close the sockets; messages that come after that are dropped."""
        if not self._input.closed:
            self._close_feed()
            for socket in (self._output, self._input):
                self._thread.unwatch(socket)
                socket.close()
            self._context.term()

    # Calls of the client.

    def add(self, request: EngineCoreRequest) -> None:
        """Send a request to the core that the router chooses, as soon as it takes requests."""
        if self._lacks_feed and time.monotonic() >= self._feed_at:
            self._follow_stats()
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
            self._thread.on_sent(feed.socket)

    def abort(self, request_ids: Iterable[str], stopped: Collection[str] = ()) -> None:
        """Have requests dropped by the cores that have them; stop strings have ended those that are `stopped`."""
        for rank, ids in self.router.abort(request_ids).items():
            names = [request_id for request_id in ids if request_id in stopped]
            self._send(rank, EngineCoreRequestType.ABORT, ids, *self._encoder.encode(names) if names else ())

    def call(self, call_id: int) -> None:
        """Send a registered utility call."""
        ranks = list(self.router.table.usable)
        self._send_calls(self.calls.address(call_id, ranks, self.client_index))

    # News of the host.

    def on_attached(
        self, client_index: int, engine_ranks: list[int], tensors: ShmTensorSender | None
    ) -> None:
        """Take in a new lease."""
        self.client_index = client_index
        self._tensors = tensors
        self._encoder.oob_tensor_consumer = tensors
        self.router.table.begin_lease(client_index)
        self.set_ranks(engine_ranks)

    def on_scaled(self, future: Future[int], answer: Scaled) -> None:
        """Answer a call of `scale` once its caller finds the ranks changed: the host has heard of new engine
        cores before they have connected to this client."""
        if not future.set_running_or_notify_cancel():
            return
        if answer.error is None:
            self._scaled.append((future, answer.data_parallel_size))
            self._answer_scaled()
        else:
            future.set_exception(NBEngineError(f"engine {self.info.name} was not scaled: {answer.error}"))

    def on_dead(self, error: NBEngineError) -> None:
        """Take in what has come before, and fail the calls of `scale`: the engine has ended."""
        self._take_what_has_come()
        scaled, self._scaled = self._scaled, []
        for future, _ in scaled:
            future.set_exception(error)

    def on_detached(self) -> None:
        """Forget every request: the lease is lost."""
        self.router.clear()

    def set_ranks(self, engine_ranks: list[int]) -> None:
        """Take in the ranks that may get requests."""
        self.router.table.set_ranks(engine_ranks)
        self._on_ranks_changed()

    def on_ready(self, ready: EngineReady) -> None:
        """Take note that a core is ready; it takes requests once it has connected."""
        self.router.on_ready(ready)
        self._on_ranks_changed()

    def on_lost(self, lost: EngineLost) -> None:
        """Take note that a core has ended; outputs that it has sent before still count."""
        self._take_what_has_come()
        home = (lost.rank, lost.incarnation)
        self.router.table.on_lost(*home, restarting=lost.restarting)
        self.calls.lose(lost.rank, lost.cause)
        begun = self.router.take_begun(home)
        self._fail(begun, lost.rank, f"engine core {lost.rank} ended while it worked on it: {lost.cause}")
        self._on_ranks_changed()

    # Messages of the cores and the coordinator.

    def _on_input(self, frames: Sequence[bytes]) -> None:
        """Take note of an engine core that has connected; it sends nothing else here."""
        try:
            client_index, rank, incarnation = decode_announcement(frames[0], frames[-1], self.secret)
        except WireError as error:
            message = "dropped a message of a peer of engine %s: %s"
            self._peer_log.warn_of(frames[0], message, self.info.name, error)
            return
        self.router.table.on_connected(rank, incarnation, client_index)
        self._on_ranks_changed()

    def _on_output(self, frames: Sequence[bytes]) -> None:
        try:
            if frames[0] == ENGINE_CORE_DEAD:
                self._on_farewell(*decode_home(frames[1], frames[2], self.secret))
                return
            outputs = self._decoder.decode(frames)
        except (WireError, IndexError) as error:
            self._peer_log.warn_of("outputs", "dropped outputs of engine %s: %s", self.info.name, error)
            return
        if outputs.utility_output is not None:
            self._send_calls(self.calls.answer(outputs.engine_index, outputs.utility_output))
            return
        if self.router.table.on_heard(outputs.engine_index, outputs.incarnation):
            self._on_ranks_changed()
        self.router.take_in(outputs)
        if outputs.outputs or outputs.finished_requests or outputs.prompts_read:
            self._consumer.on_outputs(outputs)
        if outputs.returned:
            self._on_returned(outputs.returned, (outputs.engine_index, outputs.incarnation))

    def _take_what_has_come(self) -> None:
        """Take in outputs that wait to be read: the host's news of an end, on another socket, may overtake them."""
        while not self._output.closed and self._output.poll(0):
            self._on_output(self._output.recv_multipart())

    def _on_farewell(self, rank: int, incarnation: int) -> None:
        self._listener.on_farewell(rank, incarnation)
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
        """Send waiting requests, and those that departed cores will not answer,
        to cores that take requests now."""
        router = self.router
        router.update()
        self._follow_stats()
        self._listener.on_usable()
        self._answer_scaled()
        for home in router.table.departed():
            for request in router.take_unbegun(home):
                self.add(request)
            # The host sends no further news of a core that leaves in good order.
            self.calls.lose(home.rank, "it has gone")
            router.table.forget(home)
        for request in router.take_waiting():
            self.add(request)

    def _answer_scaled(self) -> None:
        if self._scaled and self.router.table.all_connected:
            scaled, self._scaled = self._scaled, []
            for future, data_parallel_size in scaled:
                future.set_result(data_parallel_size)

    def _follow_stats(self) -> None:
        config, router = self.info.config, self.router
        wanted = config.lock_step or (len(router.table.ranks) > 1 and router.bound_rank is None)
        if not wanted:
            self._close_feed()
        elif self._feed is None:
            self._open_feed()
        self._lacks_feed = wanted and self._feed is None

    def _open_feed(self) -> None:
        """Follow the statistics, now or after a shortage:
        balancing and waves work without them for a while."""
        try:
            self._feed = StatsFeed(self._context, self.info)
        except NBEngineError as error:
            self._feed_at = time.monotonic() + self._feed_setbacks.note(error)
            return
        self._thread.watch(self._feed.socket, self._on_stats)

    def _close_feed(self) -> None:
        if self._feed is not None:
            self._thread.unwatch(self._feed.socket)
            self._feed.close()
            self._feed = None

    def _send_calls(self, calls: Iterable[tuple[int, UtilityRequest]]) -> None:
        for rank, request in calls:
            try:
                self._send(rank, EngineCoreRequestType.UTILITY, request)
            except WireError as error:
                self.calls.refuse(request.call_id, str(error))

    def _send(self, rank: int, request_type: EngineCoreRequestType, payload: Any, *more: Buffer) -> None:
        """Encode a message and send it to a core, `more` frames behind it.

        Raises:
            WireError: the payload cannot be encoded.
        """
        if self._input.closed:
            return
        self._pending_messages = [item for item in self._pending_messages if not item[0].done]
        frames = self._encoder.encode(payload)
        message = (engine_identity(rank, self.secret), request_type.value, *frames, *more)
        if len(frames) == 1:
            self._input.send_multipart(message)
        else:
            # Tensors are sent from their own memory, which must live until they have been sent.
            tracker = self._input.send_multipart(message, copy=False, track=True)
            self._pending_messages.append((cast("zmq.MessageTracker", tracker), payload))
        self._thread.on_sent(self._input)

    def _fail(self, request_ids: list[str], lost_rank: int | None, reason: str) -> None:
        """End requests with an error, for their callers alone."""
        failures = [
            EngineCoreOutput(
                request_id, [], finish_reason=FinishReason.ERROR, error=reason, lost_rank=lost_rank
            )
            for request_id in request_ids
        ]
        if failures:
            self._consumer.on_outputs(EngineCoreOutputs(outputs=failures))


def tensor_sender(tensor_dir: str, client_index: int) -> ShmTensorSender | None:
    """Make the sender of large tensors, None where the engine takes none or its directory is out of reach."""
    if not tensor_dir:
        return None
    try:
        return ShmTensorSender(tensor_dir, client_index)
    except NBEngineError as error:
        logger.info("tensors go through the sockets: %s", error)
        return None
