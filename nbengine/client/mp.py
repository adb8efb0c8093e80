"""The client of an engine in other processes, which is composed of its connections and their thread."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from nbengine.client.calls import merged_answers
from nbengine.client.link.host_link import HostLink
from nbengine.client.link.ready_wait import ReadyWait
from nbengine.client.link.stalls import HOST_RANK, Stalls, stopped_process
from nbengine.client.routing.core_link import CoreLink, OutputConsumer, tensor_sender
from nbengine.client.routing.core_table import checked_rank
from nbengine.client.standing import Standing
from nbengine.client.threads.socket_thread import SocketThread
from nbengine.config import EngineConfig
from nbengine.errors import EngineDeadError, EngineStartError, LeaseExpiredError, NBEngineError
from nbengine.ipc.control_messages import (
    EngineLost,
    EngineReady,
    HistoryPage,
    Progress,
    ReadHistory,
    Scaled,
    Stalled,
)
from nbengine.ipc.messages import EngineCoreRequest
from nbengine.ipc.shm_tensors import ShmTensorSender
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.progress import ProgressCallback

logger = logging.getLogger(__name__)


class MPClient:
    """A client that is connected to the engine cores (`cores`) and to their host (`link`), which gives it a
    lease; `standing` says whether it can be used.

    Args:
        info: where the engine lives.
        thread: the thread that the sockets belong to.
        consumer: the consumer of the outputs.
        session: name of this client across restarts of its process, made up if None.
        owns_engine: this process has started the engine.
        data_parallel_rank: the rank that gets all requests; None balances between all ranks.

    The host link calls the `on_…` methods with a host's news on its own thread, the core link those of
    `CoreListener` on the thread of the sockets.
    """

    config: EngineConfig

    def __init__(
        self,
        info: ConnectionInfo,
        thread: SocketThread,
        consumer: OutputConsumer,
        *,
        session: str | None = None,
        owns_engine: bool = False,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.info = info
        self.config = info.config
        self.ready: EngineReady | None = None
        self.later_progress: ProgressCallback | None = None
        """A callback, on the link's thread, for the progress of engine cores that start later."""
        self.standing = Standing()
        self.stalls = Stalls()
        self.cores = CoreLink(info, thread, consumer, self, data_parallel_rank)
        self.session = session or secrets.token_hex(8)
        """The name of this client across restarts of its process."""
        self.link = HostLink(info, self.session, *self.cores.addresses, self, self.cores.secret)
        self._thread = thread
        self._consumer = consumer
        self._owns_engine = owns_engine
        self._readiness = ReadyWait(info, self.cores.router.table, self.stalls, is_owner=owns_engine)
        self._tensors: ShmTensorSender | None = None
        self._has_left = False
        self._closed = False
        thread.start(self.cores, self._on_failure)
        self.link.start()

    @property
    def connection(self) -> ConnectionInfo:
        """Return where the engine lives."""
        return self.info

    @property
    def client_index(self) -> int:
        """Return the number that marks this client's requests in the engine;
        it changes after a lease was lost."""
        return self.standing.client_index

    @property
    def death(self) -> NBEngineError | None:
        """Return the error that says why the engine has ended, None while this client knows of no end."""
        return self.standing.error if self.standing.is_dead and not self._has_left else None

    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        """Wait for every engine core's READY and for its first messages on both sockets.

        A client that attaches does not wait long for these messages: its requests wait for the core instead.
        This returns the READY of the core with the least `max_model_len`.

        Raises:
            EngineStartError, EngineDeadError: the engine has ended, or a core does not connect.
            EngineStalledError: a client that attaches finds that the host or a core stands.
        """
        ready = self._readiness.wait(progress)
        checked_rank(self.cores.router.bound_rank, self.cores.router.table.ranks)
        self.info.ready = ready
        self.ready = min(ready, key=lambda core: core.max_model_len)
        return self.ready

    @property
    def engine_ranks(self) -> Sequence[int]:
        """Return the ranks that a request may be meant for."""
        bound = self.cores.router.bound_rank
        return self.cores.router.table.expected if bound is None else [bound]

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to an engine core, as soon as one takes it."""
        self.check_alive()
        request.client_index = self.client_index
        self._thread.run_soon(self._add_now, request)

    def abort_requests(self, request_ids: Iterable[str], *, stopped: Collection[str] = ()) -> None:
        """Have the engine cores drop requests, of which stop strings have ended those that are `stopped`; this
        has no effect when the engine is dead."""
        request_ids = list(request_ids)
        if request_ids and self.standing.error is None:
            self._thread.run_soon(self.cores.abort, request_ids, stopped)

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Send a utility call; safe on any thread."""
        call_id, future = self.cores.calls.begin(method, args)
        if self.standing.error is None:
            self._thread.run_soon(self.cores.call, call_id)
        # The engine may have died between the first look and the registration.
        if (error := self.standing.error) is not None:
            self.cores.calls.fail(error)
        return future

    def call_within(self, timeout: float, method: str, *args: Any) -> tuple[Any, list[int]]:
        """Make a utility call as `EngineCoreClient.call_within` says."""
        self.check_alive()
        call_id, future = self.cores.calls.begin(method, args)
        self._thread.run_soon(self.cores.call, call_id)
        try:
            return future.result(timeout), []
        except TimeoutError:
            answers, missing = self.cores.calls.give_up(call_id)
        # It may have been answered just now.
        if future.done():
            return future.result(), []
        return merged_answers(method, answers) if answers else None, missing or list(self.engine_ranks)

    @property
    def stall(self) -> str | None:
        """Say in one line what makes no progress in the engine;
        None if this client has been told of nothing."""
        return self.stalls.describe()

    def ask_health(self) -> list[Future[Any]]:
        """Ask every engine core, which asks its workers, and the host."""
        return [self.submit_utility("check_health"), self.link.ask_host()]

    def describe_silence(self, missing: Sequence[Future[Any]]) -> str:
        """Say which processes have not answered a health check, and why, if that is known."""
        silent = sorted({rank for future in missing for rank in self.cores.calls.unanswered(future)})
        names = [f"engine core {rank}" for rank in silent] or [f"the host (pid {self.info.host_pid})"]
        known = self.stall or stopped_process(self.info, silent, self.info.ready)
        return f"{', '.join(names)} ({known or 'it may be busy: no stall is known'})"

    def submit_scale(self, data_parallel_size: int) -> Future[int]:
        """Ask the host for `data_parallel_size` engine cores."""
        self.check_alive()
        return self.link.scale(data_parallel_size)

    def submit_history(self, asked: ReadHistory) -> Future[HistoryPage]:
        """Ask the host for a page of the history."""
        return self.link.read_history(asked)

    def check_alive(self) -> None:
        """Raise the error that keeps this client from being used, if any does."""
        self.standing.check()

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine, wait until nothing is left of it, and close this client;
        another call does nothing."""
        if self._closed:
            return
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

    @property
    def ends_engine(self) -> bool:
        """Tell whether the engine ends with this client, which has started it as a bound engine."""
        return self._owns_engine and self.config.bound

    def release(self) -> None:
        """End the engine if it is this client's and bound, else detach;
        this does not wait and takes no lock."""
        if self.ends_engine:
            self.link.request_shutdown()
        else:
            self.link.request_detach()
        self._thread.request_close()

    def close(self) -> None:
        """Close the sockets and end their thread; leaves engine and lease alone."""
        self._closed = True
        self._thread.close()

    # Calls of the core link, on the thread of the sockets.

    def on_farewell(self, rank: int, incarnation: int) -> None:
        """Take note that a core has said good-bye."""
        self.link.core_died(rank, incarnation)

    def on_usable(self) -> None:
        """Take note that other ranks take requests; after a lost lease, go on when all of them do."""
        if self.cores.router.table.all_usable:
            self.standing.connected(self.cores.client_index)
        if self.ready is None:
            self._readiness.tell(None)

    # Calls of the host link, on its thread.

    def on_attached(self, client_index: int, engine_ranks: list[int], tensor_dir: str) -> None:
        """Take in a new lease."""
        self.standing.attached(client_index)
        self._readiness.is_attached = True
        self._tensors = tensor_sender(tensor_dir, client_index)
        self._thread.run_soon(self.cores.on_attached, client_index, engine_ranks, self._tensors)

    def on_progress(self, progress: Progress) -> None:
        """Pass on the progress of a start."""
        if self.ready is None:
            self._readiness.tell(progress)
        elif (tell := self.later_progress) is not None:
            tell(progress)

    def on_ready(self, ready: EngineReady) -> None:
        """Take note of an engine core that is ready, at the start or later."""
        self.stalls.clear(ready.rank)
        self._thread.run_soon(self.cores.on_ready, ready)
        if self.ready is None:
            self._readiness.tell(ready)
        else:
            others = [core for core in self.info.ready if core.rank != ready.rank]
            self.info.ready = sorted([*others, ready], key=lambda core: core.rank)

    def on_ranks_changed(self, engine_ranks: list[int]) -> None:
        """Send requests to these engine cores, and to no others, from now on."""
        self._thread.run_soon(self.cores.set_ranks, engine_ranks)

    def on_engine_lost(self, lost: EngineLost) -> None:
        """Take note that one engine core of several has ended."""
        self.stalls.clear(lost.rank)
        self._thread.run_soon(self.cores.on_lost, lost)

    def on_stalled(self, stalled: Stalled) -> None:
        """Take note that a part of the engine makes no progress, and log it."""
        self.stalls.note(stalled)
        logger.warning("engine %s: %s", self.info.name, self.stalls.describe(stalled.rank))
        if self.ready is None:
            is_host = stalled.rank == HOST_RANK
            said = f"{'no answer' if is_host else 'no progress'} for {stalled.seconds:.0f} s, {stalled.doing}"
            self._readiness.tell(Progress("load", said, rank=None if is_host else stalled.rank))

    def on_recovered(self, rank: int) -> None:
        """Take note that a part of the engine goes on."""
        self.stalls.clear(rank)

    def on_scaled(self, future: Future[int], answer: Scaled) -> None:
        """Answer a call of `scale`, once its caller finds the ranks changed."""
        self._thread.run_soon(self.cores.on_scaled, future, answer)

    def on_lease_lost(self, error: LeaseExpiredError) -> None:
        """Fail all requests; the client itself goes on."""
        self._fail(error, dead=False)
        self._thread.run_soon(self.cores.on_detached)

    def on_dead(self, error: EngineStartError | EngineDeadError) -> None:
        """Fail everything: the engine has ended."""
        self.stalls.clear()
        self._fail(error, dead=True)
        self._readiness.tell(error)

    # The rest.

    def _on_failure(self, error: BaseException) -> None:
        """End this client after a failure on the thread of the sockets that is no shortage;
        the engine goes on."""
        logger.error("the sockets of engine %s failed", self.info.name, exc_info=error)
        self._fail(EngineDeadError(f"the connection to the engine failed: {error!r}"), dead=True)

    def _add_now(self, request: EngineCoreRequest) -> None:
        # If the lease was lost after this was posted, the request was lost with it.
        if self.standing.error is None and request.client_index == self.client_index:
            self.cores.add(request)

    def _fail(self, error: NBEngineError, *, dead: bool) -> None:
        client_index = self.client_index
        if not self.standing.fail(error, dead=dead):
            return
        if self._tensors is not None:
            self._tensors.close()
        self.cores.calls.fail(error)
        if dead:
            self._thread.run_soon(self.cores.on_dead, error)
        self._consumer.on_error(error, dead=dead, client_index=client_index)
