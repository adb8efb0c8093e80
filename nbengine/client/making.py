"""The making of clients that start their engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nbengine.checks import require
from nbengine.client.base import BlockingClient
from nbengine.client.data_parallel import DPLBAsyncMPClient
from nbengine.client.engines.directory import clear_dead_engines
from nbengine.client.engines.launch import discarded_on_error, launch_engine
from nbengine.client.sync_mp import SyncMPClient
from nbengine.config import EngineConfig
from nbengine.runtime.progress import ProgressCallback

if TYPE_CHECKING:
    from nbengine.client.threads.loop_thread import LoopThread


def make_client(
    config: EngineConfig,
    *,
    multiprocess: bool = True,
    name: str | None = None,
    progress: ProgressCallback | None = None,
) -> BlockingClient:
    """Start an engine and return a client whose outputs are fetched;
    `wait_ready` waits until the engine is ready.

    Args:
        config: how to build the engine; its model must be resolved.
        multiprocess: run the engine in its own processes; otherwise in this one, which loads the model
            now.
        name: the engine's name; after its model if None.
        progress: called while an engine in this process loads the model.

    Raises:
        EngineStartError: the engine cannot be started.
        InvalidArgumentError: the name is taken, or this process cannot run an engine of this
            configuration.
    """
    if not multiprocess:
        from nbengine.client.inproc import InprocClient

        _check_single(config)
        return InprocClient(config, progress)
    clear_dead_engines()
    info = launch_engine(config, name=name)
    with discarded_on_error(info):
        return SyncMPClient(info, owns_engine=True)


def make_async_mp_client(
    config: EngineConfig, loop_thread: LoopThread, *, name: str | None = None, session: str | None = None
) -> DPLBAsyncMPClient:
    """Start an engine and return a client of it whose outputs arrive on `loop_thread`; see `make_client`.

    Args:
        session: name of this client across restarts of its process, made up if None.
    """
    clear_dead_engines()
    info = launch_engine(config, name=name)
    with discarded_on_error(info):
        return DPLBAsyncMPClient(info, loop_thread, session=session, owns_engine=True)


def _check_single(config: EngineConfig) -> None:
    parallel = config.parallel
    for name, value, only in (
        ("data_parallel_size", parallel.data_parallel_size, 1),
        ("data_parallel_backend", parallel.data_parallel_backend, "mp"),
        ("data_parallel_address", parallel.data_parallel_address, None),
        ("metrics_port", config.metrics_port, None),
    ):
        require(name, value, value == only, f"{only!r} with multiprocess=False")
