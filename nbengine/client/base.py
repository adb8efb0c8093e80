"""The interface of a client, which is a frontend's side of an engine, wherever that runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from nbengine.config import EngineConfig
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import EngineReady, HistoryPage, ReadHistory
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.progress import ProgressCallback


class EngineCoreClient(Protocol):
    """A client, which sends requests to the engine cores and brings back what they return.

    Utility calls, whatever they are for, take one path: `submit_utility(method, *args)`.
    """

    @property
    def config(self) -> EngineConfig:
        """Return the engine's configuration."""

    @property
    def connection(self) -> ConnectionInfo | None:
        """Return where the engine lives; None: in this process."""

    @property
    def client_index(self) -> int:
        """Return the number that marks this client's requests in the engine;
        it changes after a lease was lost."""

    @property
    def death(self) -> NBEngineError | None:
        """Return the error that says why the engine has ended, None while this client knows of no end."""

    @property
    def stall(self) -> str | None:
        """Say in one line what makes no progress in the engine;
        None if this client has been told of nothing."""

    @property
    def engine_ranks(self) -> Sequence[int]:
        """Return the data-parallel ranks that a request may be meant for."""

    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        """Wait until the engine takes requests; `progress` is called on this thread.

        Raises:
            EngineStartError: the engine did not start.
        """

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the engine core."""

    def abort_requests(self, request_ids: Iterable[str], *, stopped: Collection[str] = ()) -> None:
        """Have the engine cores drop requests; unknown ids are ignored. Those that are `stopped`, too, have ended
        with a stop string, and count as such."""

    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Start a utility call, of a method of the engine core by name; the future gets its result, or
        `UtilityError`: the engine has no such method, or it failed."""

    def call_within(self, timeout: float, method: str, *args: Any) -> tuple[Any, list[int]]:
        """Make a utility call; return the answer of the engine cores that give one within `timeout` seconds,
        and the other ranks.

        The answer is None if no core gives one.

        Raises:
            UtilityError: the engine has no such method, or it failed.
        """

    def submit_scale(self, data_parallel_size: int) -> Future[int]:
        """Start or end engine cores until `data_parallel_size` run;
        the future gets their number, or `NBEngineError`."""

    def submit_history(self, asked: ReadHistory) -> Future[HistoryPage]:
        """Ask for a page of the history that the engine's host keeps; the future gets it, or `NBEngineError`."""

    def ask_health(self) -> list[Future[Any]]:
        """Ask every process that takes part in a step; the futures get the answers."""

    def describe_silence(self, missing: Sequence[Future[Any]]) -> str:
        """Say which processes have not answered a health check, and why, if that is known."""

    def check_alive(self) -> None:
        """Raise the error that keeps this client from being used, if any does.

        Raises:
            EngineDeadError: the engine has ended.
            LeaseExpiredError: the lease was lost and is being renewed.
        """

    def abandon(self) -> None:
        """Undo the construction of a client that did not get ready, and end an engine that it has started."""

    def release(self) -> None:
        """Let go of the engine when nobody refers to the client's owner any more;
        a bound engine that it has started ends.

        This does not wait. It is safe on any thread, in finalizers and at the interpreter's exit.
        """

    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine, with `drain` after its requests have finished,
        and wait until nothing is left of it."""


class BlockingClient(EngineCoreClient, Protocol):
    """A client whose outputs are fetched one batch after another."""

    def get_output(self, on_quiet: Callable[[], object] | None = None) -> EngineCoreOutputs:
        """Wait for the next outputs. An interrupt is raised as soon as it does no harm, and loses none.

        Where none come for a moment, `on_quiet` is called, once.

        Raises:
            EngineDeadError: the engine has ended.
            LeaseExpiredError: the lease under which requests were sent was lost.
        """
