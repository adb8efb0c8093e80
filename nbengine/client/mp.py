"""What the clients of an engine in other processes share: life and death, and the way to the thread of the sockets."""

from __future__ import annotations

import copy
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import zmq

from nbengine.checks import require
from nbengine.client.base import EngineCoreClient
from nbengine.client.connection import ConnectionInfo
from nbengine.client.core_link import CoreLink, FramesHandler, tensor_sender
from nbengine.client.host_link import HostLink
from nbengine.errors import (
    EngineDeadError,
    EngineStartError,
    LeaseExpiredError,
    NBEngineError,
)
from nbengine.ipc.control_messages import EngineLost, EngineReady, Progress, Scaled
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.models.progress import ProgressCallback

CONNECT_TIMEOUT = 30.0
"""Seconds that an engine core, once ready, may take to connect to this client."""

_Event = Progress | EngineReady | NBEngineError | None


class MPClient(EngineCoreClient):
    """Connected to the engine cores (`CoreLink`) and to their host (`HostLink`), with which it keeps a lease.

    Args:
        info: where the engine lives.
        session: name of this client across restarts of its process, made up if None.
        owns_engine: this process has started the engine.
        data_parallel_rank: where all requests go; None balances between the ranks that there are.

    A subclass owns the thread of the sockets, which `cores` belongs to: `_run_soon` has a function called there. The
    host link calls the `on_…` methods with a host's news on its own thread, the core link those of its owner on the
    thread of the sockets.
    """

    def __init__(
        self,
        info: ConnectionInfo,
        *,
        session: str | None = None,
        owns_engine: bool = False,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.info = info
        self.config = info.config
        self.ready: EngineReady | None = None
        self.later_progress: ProgressCallback | None = None
        """Called, on the link's thread, with what engine cores report that start when this client is ready."""
        self._owns_engine = owns_engine
        self._error: NBEngineError | None = None
        self._is_dead = False
        self._has_left = False
        self._closed = False
        self._has_lease = False
        self._client_index = 0
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self._tensors: ShmTensorSender | None = None
        self._scaled: list[Future[int]] = []
        """Of calls whose engine cores are all there but not all connected."""
        self.cores = CoreLink(info, self, data_parallel_rank)
        self.session = session or secrets.token_hex(8)
        """Name of this client across restarts of its process."""
        self.link = HostLink(info, self.session, *self.cores.addresses, self)

    @property
    def connection(self) -> ConnectionInfo:
        """Where the engine lives."""
        return self.info

    @property
    def client_index(self) -> int:
        """By which the engine knows this client's requests; another one after a lease was lost."""
        return self._client_index

    @property
    def death(self) -> NBEngineError | None:
        """Why the engine has ended, as far as this client knows that it has."""
        return self._error if self._is_dead and not self._has_left else None

    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        """Wait for every engine core's READY and for its first message on the input socket.

        Returns that of the core with the least `max_model_len`.
        """
        table = self.cores.router.table
        ready: dict[int, EngineReady] = {}
        deadline: float | None = None
        while deadline is None or not table.all_usable:
            event = self._next_event(deadline)
            if isinstance(event, NBEngineError):
                raise event
            if isinstance(event, Progress) and progress is not None:
                progress(event)
            if isinstance(event, EngineReady):
                ready[event.rank] = event
            if deadline is None and table.ranks and set(table.ranks) <= ready.keys():
                deadline = time.monotonic() + CONNECT_TIMEOUT
        self._check_bound_rank()
        self.info.ready = [ready[rank] for rank in table.ranks]
        self.ready = min(self.info.ready, key=lambda core: core.max_model_len)
        return self.ready

    @property
    def engine_ranks(self) -> Sequence[int]:
        """The ranks that a request may be meant for."""
        bound = self.cores.router.bound_rank
        return self.cores.router.table.expected if bound is None else [bound]

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to an engine core, as soon as one takes it."""
        self.check_alive()
        request.client_index = self._client_index
        self._run_soon(self._add_now, request)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Tell the engine cores that have them to drop requests; of no effect when the engine is dead."""
        request_ids = list(request_ids)
        if request_ids and self._error is None:
            self._run_soon(self.cores.abort, request_ids)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Send a utility call; safe on any thread."""
        call_id, future = self.cores.calls.begin(method, args)
        if self._error is None:
            self._run_soon(self.cores.call, call_id)
        # The engine may have died between the first look and the registration.
        if self._error is not None:
            self.cores.calls.fail(self._error)
        return future

    def submit_scale(self, data_parallel_size: int) -> Future[int]:
        """Ask the host for so many engine cores."""
        self.check_alive()
        return self.link.scale(data_parallel_size)

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
        self._has_left = True
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
    def _run_soon(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function called on the thread of the sockets, in the order of the calls; safe on any thread."""

    @abstractmethod
    def _deliver_error(self, error: NBEngineError, *, dead: bool) -> None:
        """Tell whoever processes outputs that all requests have failed; called on any thread."""

    @abstractmethod
    def _request_close(self) -> None:
        """Have the sockets closed; does not wait and takes no lock."""

    @abstractmethod
    def _close_sockets(self) -> None:
        """Have the sockets closed and wait for it; calling it again does nothing."""

    # What the core link tells and wants, on the thread of the sockets.

    @abstractmethod
    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Pass outputs on to whoever processes them."""

    @abstractmethod
    def watch(self, socket: zmq.Socket[bytes], handle: FramesHandler) -> None:
        """Call `handle` for what comes on a socket from now on."""

    @abstractmethod
    def unwatch(self, socket: zmq.Socket[bytes]) -> None:
        """Undo `watch`."""

    def on_sent(self, socket: zmq.Socket[bytes]) -> None:
        """Something was sent on a socket that is also read."""

    def on_farewell(self, rank: int) -> None:
        """A core has said good-bye."""
        self.link.core_died(rank)

    def on_usable(self) -> None:
        """The ranks that take requests have changed; a client that had lost its lease goes on when all do."""
        if (
            isinstance(self._error, LeaseExpiredError)
            and self._has_lease
            and self.cores.client_index == self._client_index
            and self.cores.router.table.all_usable
        ):
            self._error = None
        if self.ready is None:
            self._events.put(None)

    # What the host link tells, on its thread.

    def on_attached(self, client_index: int, engine_ranks: list[int], tensor_dir: str) -> None:
        """A lease is held."""
        self._client_index = client_index
        self._has_lease = True
        self._tensors = tensor_sender(tensor_dir, client_index)
        self._run_soon(self.cores.on_attached, client_index, engine_ranks, self._tensors)

    def on_progress(self, progress: Progress) -> None:
        """The start makes progress."""
        if self.ready is None:
            self._events.put(progress)
        elif self.later_progress is not None:
            self.later_progress(progress)

    def on_ready(self, ready: EngineReady) -> None:
        """An engine core is ready, at the start or later."""
        self._run_soon(self.cores.on_ready, ready)
        if self.ready is None:
            self._events.put(ready)
        else:
            others = [core for core in self.info.ready if core.rank != ready.rank]
            self.info.ready = sorted([*others, ready], key=lambda core: core.rank)

    def on_ranks_changed(self, engine_ranks: list[int]) -> None:
        """Requests may go to these engine cores, and to no others."""
        self._run_soon(self.cores.set_ranks, engine_ranks)

    def on_engine_lost(self, lost: EngineLost) -> None:
        """One engine core of several has ended."""
        self._run_soon(self.cores.on_lost, lost)

    def on_scaled(self, future: Future[int], answer: Scaled) -> None:
        """The caller of `scale` finds the ranks changed."""
        self._run_soon(self._answer_scale, future, answer)

    def on_lease_lost(self, error: LeaseExpiredError) -> None:
        """All requests are gone, the client itself goes on."""
        self._has_lease = False
        self._fail(error, dead=False)
        self._run_soon(self.cores.on_detached)

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

    def _check_bound_rank(self) -> None:
        rank, ranks = self.cores.router.bound_rank, self.cores.router.table.ranks
        allowed = f"None, or a rank of the engine ({', '.join(map(str, ranks))})"
        require("data_parallel_rank", rank, rank is None or rank in ranks, allowed)

    def _answer_scale(self, future: Future[int], answer: Scaled) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if answer.error is not None:
            future.set_exception(NBEngineError(f"engine {self.info.name} was not scaled: {answer.error}"))
            return
        # The host has heard of the new engine cores before they have connected to this client.
        self._scaled.append(future)
        self.cores.when_all_usable(partial(self._finish_scale, future, answer.data_parallel_size))

    def _finish_scale(self, future: Future[int], answer: int | NBEngineError) -> None:
        if future not in self._scaled:
            return
        self._scaled.remove(future)
        if isinstance(answer, int):
            future.set_result(answer)
        else:
            future.set_exception(answer)

    def _fail_scaled(self, error: NBEngineError) -> None:
        for future in list(self._scaled):
            self._finish_scale(future, error)

    def _add_now(self, request: EngineCoreRequest) -> None:
        # If the lease was lost after this was posted, the request was lost with it.
        if self._error is None and request.client_index == self._client_index:
            self.cores.add(request)

    def _fail(self, error: NBEngineError, *, dead: bool) -> None:
        if self._is_dead:
            return
        self._error, self._is_dead = error, dead
        if self._tensors is not None:
            self._tensors.close()
        self.cores.calls.fail(error)
        if dead:
            self._run_soon(self._fail_scaled, error)
        self._deliver_error(error, dead=dead)
