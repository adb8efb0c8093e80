"""The frontend's side of an engine core, wherever that runs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from nbengine.checks import require
from nbengine.config import EngineConfig, ParallelConfig
from nbengine.errors import InvalidTypeError, NBEngineError
from nbengine.ipc.control_messages import EngineReady
from nbengine.ipc.messages import EngineCoreOutputs, EngineCoreRequest
from nbengine.models.progress import ProgressCallback

if TYPE_CHECKING:
    from nbengine.client.connection import ConnectionInfo
    from nbengine.client.data_parallel import DPLBAsyncMPClient
    from nbengine.frontend.loop_thread import LoopThread


class EngineCoreClient(ABC):
    """Sends requests to an engine core and brings back what it returns.

    Utility calls, whatever they are for, take one path: `call_utility(method, *args)`.
    """

    config: EngineConfig

    @property
    def connection(self) -> ConnectionInfo | None:
        """Where the engine lives; None: in this process."""
        return None

    @staticmethod
    def make_client(
        config: EngineConfig,
        *,
        multiprocess: bool = True,
        name: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> BlockingClient:
        """Start an engine and return a client of it whose outputs are fetched; `wait_ready` tells when it is ready.

        Args:
            config: how to build the engine; its model must be resolved.
            multiprocess: run the engine in processes of its own; otherwise in this one, which loads the model now.
            name: of the engine, after its model if None.
            progress: called while an engine in this process loads the model.

        Raises:
            EngineStartError: the engine cannot be started.
            InvalidArgumentError: the name is taken, or one process cannot hold what is asked for.
        """
        if not multiprocess:
            from nbengine.client.inproc import InprocClient

            _check_single(config.parallel)

            return InprocClient(config, progress)
        from nbengine.client.launch import discarded_on_error, launch_engine
        from nbengine.client.sync_mp import SyncMPClient

        info = launch_engine(config, name=name)
        with discarded_on_error(info):
            return SyncMPClient(info, owns_engine=True)

    @staticmethod
    def make_async_mp_client(
        config: EngineConfig, loop_thread: LoopThread, *, name: str | None = None, session: str | None = None
    ) -> DPLBAsyncMPClient:
        """Start an engine and return a client of it whose outputs arrive on `loop_thread`; see `make_client`.

        Args:
            session: name of this client across restarts of its process, made up if None.
        """
        from nbengine.client.data_parallel import DPLBAsyncMPClient
        from nbengine.client.launch import discarded_on_error, launch_engine

        info = launch_engine(config, name=name)
        with discarded_on_error(info):
            return DPLBAsyncMPClient(info, loop_thread, session=session, owns_engine=True)

    @abstractmethod
    def wait_ready(self, progress: ProgressCallback | None = None) -> EngineReady:
        """Wait until the engine takes requests; `progress` is called on this thread.

        Raises:
            EngineStartError: it did not start.
        """

    @property
    def client_index(self) -> int:
        """By which the engine knows this client's requests; another one after a lease was lost."""
        return 0

    @property
    def death(self) -> NBEngineError | None:
        """Why the engine has ended, as far as this client knows that it has."""
        return None

    @property
    @abstractmethod
    def engine_ranks(self) -> Sequence[int]:
        """The data-parallel ranks that a request may be meant for."""

    def check_rank(self, rank: int | None) -> None:
        """Check a `data_parallel_rank` that a caller asks for; safe on any thread.

        Raises:
            InvalidArgumentError: there is no such rank, or this client is bound to another one.
        """
        if rank is None:
            return
        allowed = f"None, or a rank of the engine ({', '.join(map(str, self.engine_ranks))})"
        if not isinstance(rank, int) or isinstance(rank, bool):
            raise InvalidTypeError("data_parallel_rank", rank, allowed)
        require("data_parallel_rank", rank, rank in self.engine_ranks, allowed)

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request to the engine core."""

    @abstractmethod
    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Tell the engine core to drop requests; unknown ids are ignored."""

    @abstractmethod
    def submit_utility(self, method: str, *args: Any) -> Future[Any]:
        """Start a utility call; the future gets its result, or `UtilityError`."""

    @abstractmethod
    def submit_scale(self, data_parallel_size: int) -> Future[int]:
        """Start or end engine cores until there are so many; the future gets their number, or `NBEngineError`."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise what keeps the client from being used, if anything does.

        Raises:
            EngineDeadError: the engine has ended.
            LeaseExpiredError: the lease was lost and is being renewed.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Undo the construction of a client that did not get ready: an engine that it has started is ended."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the engine when nobody refers to the client's owner any more: a bound engine of its own ends.

        Does not wait. Safe on any thread, in finalizers and at the interpreter's exit.
        """

    @abstractmethod
    def shutdown(self, *, drain: bool = False) -> None:
        """End the engine, with `drain` after what runs has finished, and wait until nothing is left of it."""

    def call_utility(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the engine core by name and wait for its result.

        Raises:
            UtilityError: the engine has no such method, or it failed.
            TimeoutError: there was no answer within `timeout` seconds.
        """
        return self.submit_utility(method, *args).result(timeout)

    def scale(self, data_parallel_size: int, timeout: float | None = None) -> int:
        """Have so many engine cores, while requests run, and return their number.

        Raises:
            InvalidArgumentError: the argument.
            NBEngineError: the engine cannot be scaled; the message says why.
            TimeoutError: it has not been done within `timeout` seconds; it goes on.
        """
        return self.submit_scale(data_parallel_size).result(timeout)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """`call_utility` for coroutines, on any event loop."""
        return await asyncio.wrap_future(self.submit_utility(method, *args))


class BlockingClient(EngineCoreClient):
    """A client whose outputs are fetched one batch after another."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Wait for the next outputs. An interrupt is raised as soon as it does no harm, and loses none.

        Raises:
            EngineDeadError: the engine has ended.
            LeaseExpiredError: the lease under which requests were sent was lost.
        """


def _check_single(parallel: ParallelConfig) -> None:
    size, backend, address = (
        parallel.data_parallel_size,
        parallel.data_parallel_backend,
        parallel.data_parallel_address,
    )
    require("data_parallel_size", size, size == 1, "1 with multiprocess=False")
    require("data_parallel_backend", backend, backend == "mp", "'mp' with multiprocess=False")
    require("data_parallel_address", address, address is None, "None with multiprocess=False")
