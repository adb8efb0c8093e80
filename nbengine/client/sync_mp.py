"""The client of `LLM`: its caller fetches the outputs, and waits for them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable
from queue import Empty, SimpleQueue
from typing import NamedTuple

from nbengine.client.mp import MPClient
from nbengine.client.threads.own_thread import OwnThread
from nbengine.errors import NBEngineError
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest
from nbengine.ipc.shortage import Setbacks
from nbengine.runtime.connection import ConnectionInfo

logger = logging.getLogger(__name__)

QUIET_SECONDS = 1.0
"""Seconds without outputs after which a client that waits for them asks why."""


class _Failure(NamedTuple):
    error: NBEngineError
    dead: bool
    client_index: int


class OutputQueue:
    """An `OutputConsumer` that keeps outputs and errors until they are fetched."""

    def __init__(self) -> None:
        self._items: SimpleQueue[EngineCoreOutputs | _Failure] = SimpleQueue()
        self._lease_of: dict[str, int] = {}
        """The number of the lease under which each request was sent whose end has not been fetched."""

    def add(self, request_id: str, client_index: int) -> None:
        """Take note of a request that is sent under a lease."""
        self._lease_of[request_id] = client_index

    def forget(self, request_ids: Iterable[str]) -> None:
        """Take note that nobody waits for these requests any more."""
        for request_id in request_ids:
            self._lease_of.pop(request_id, None)

    def on_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Keep outputs for `get`."""
        self._items.put(outputs)

    def on_error(self, error: NBEngineError, *, dead: bool, client_index: int) -> None:
        """Keep an error for `get`."""
        self._items.put(_Failure(error, dead, client_index))

    def get(self, on_quiet: Callable[[], object] | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs; raise the error that came instead of them. See `BlockingClient.get_output`."""
        while True:
            try:
                item = self._items.get(timeout=None if on_quiet is None else QUIET_SECONDS)
            except Empty:
                assert on_quiet is not None
                on_quiet()
                on_quiet = None
                continue
            if isinstance(item, EngineCoreOutputs):
                self.forget(output.request_id for output in item.outputs if output.finished)
                self.forget(item.finished_requests or ())
                return item
            if item.dead:
                self._items.put(item)
            # Requests may have been sent before and after a lease was lost.
            lost = [name for name, index in self._lease_of.items() if index <= item.client_index]
            self.forget(lost)
            # A lease that was lost while no request was under way concerns nobody.
            if item.dead or lost:
                raise copy.copy(item.error)


class SyncMPClient(MPClient):
    """The client of `LLM`: outputs wait in a queue for `get_output`, and the sockets have a thread of their
    own."""

    def __init__(
        self, info: ConnectionInfo, *, session: str | None = None, owns_engine: bool = False
    ) -> None:
        self._outputs = OutputQueue()
        thread = OwnThread(Setbacks(logger, f"the sockets of engine {info.name} falter"))
        super().__init__(info, thread, self._outputs, session=session, owns_engine=owns_engine)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to its engine core."""
        super().add_request(request)
        self._outputs.add(request.request_id, request.client_index)

    def abort_requests(self, request_ids: Iterable[str], *, stopped: Collection[str] = ()) -> None:
        """Have the engine cores drop requests; see `MPClient.abort_requests`."""
        request_ids = list(request_ids)
        self._outputs.forget(request_ids)
        super().abort_requests(request_ids, stopped=stopped)

    def get_output(self, on_quiet: Callable[[], object] | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs; an interrupt is raised at once and loses no outputs."""
        return self._outputs.get(on_quiet)
