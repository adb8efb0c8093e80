"""The launcher of engine cores on the nodes of an existing Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from nbengine.cluster.messages import Placed, RunCore
from nbengine.cluster.remote import Cluster, Listener, News, RemoteProcess
from nbengine.cluster.resources import core_bundle
from nbengine.ipc.liveness import ProcessState
from nbengine.ipc.messages import new_secret
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.processes import CoreHandle

logger = logging.getLogger(__name__)


class RayCore:
    """An engine core on some node of a cluster. It starts as soon as the cluster has room for it."""

    def __init__(self, launcher: RayLauncher, rank: int, incarnation: int) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.secret = new_secret()
        self._launcher = launcher
        self._process = launcher.place(rank, incarnation, self._on_news)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def group(self) -> None:
        return None

    def state(self) -> ProcessState:
        return ProcessState.RUNNING

    def poll(self) -> int | None:
        return self._process.status

    def describe_end(self) -> str:
        return self._process.end

    def log_tail(self) -> str:
        return self._process.log_tail

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float) -> None:
        if not self._process.wait(timeout):
            raise TimeoutError(f"engine core {self.rank} has not ended within {timeout:g} s")

    def close(self) -> None:
        self._process.finish()

    def _on_news(self, process: RemoteProcess, message: News) -> None:
        if isinstance(message, Placed):
            self._launcher.run(self.rank, self.secret, process, message)
        elif process.has_ended:
            self._launcher.take_back(process)


class RayLauncher:
    """A launcher that starts every engine core on a node that has room for it and all of its workers.

    `on_exit` is called on a thread of this object when a core has ended or turned out to have no place.

    Raises:
        EngineStartError: Ray is not installed.
    """

    def __init__(self, info: ConnectionInfo, on_exit: Callable[[], None]) -> None:
        self._info = info
        self._on_exit = on_exit
        self._cluster = Cluster(info.config.parallel.ray_address, info.name, info.run_dir)
        self._meeting: str | None = None
        self._early: list[tuple[int, bytes, RemoteProcess, Placed]] = []
        """Cores in lock step that have a place, and wait for the place of core 0, where their workers
        meet."""

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        return RayCore(self, rank, incarnation)

    def close(self) -> None:
        self._cluster.close()

    def place(self, rank: int, incarnation: int, listener: Listener) -> RemoteProcess:
        """Ask for a place for a core."""
        label = f"{Path(self._info.log_path).stem}.core{rank}.{incarnation}"
        config = self._info.config
        [process] = self._cluster.start([core_bundle(config)], config.parallel.ray_timeout, label, [listener])
        return process

    def run(self, rank: int, secret: bytes, process: RemoteProcess, place: Placed) -> None:
        """Start a core that has a place; called on the cluster's thread, like the methods below."""
        config = self._info.config
        if config.lock_step and config.parallel.data_parallel_size > 1:
            if rank == 0:
                self._meeting = place.tcp_address
            self._early.append((rank, secret, process, place))
            if self._meeting is None:
                return
            cores, self._early = self._early, []
        else:
            cores = [(rank, secret, process, place)]
        for core in cores:
            self._run(*core)

    def take_back(self, process: RemoteProcess) -> None:
        """Give back the room of a core that has ended."""
        process.give_back()
        self._on_exit()

    def _run(self, rank: int, secret: bytes, process: RemoteProcess, place: Placed) -> None:
        where = f"{place.hostname} ({place.address}), log {place.log_path}"
        logger.info("engine core %d has a place on %s", rank, where)
        config = self._info.config
        parallel = replace(
            config.parallel, ray_address=self._cluster.address, data_parallel_init_method=self._meeting
        )
        info = msgspec.structs.replace(
            self._info,
            run_dir=place.run_dir,
            tensor_dir=place.tensor_dir,
            marker=place.marker,
            log_path=place.log_path,
            config=replace(config, parallel=parallel),
        )
        process.send(RunCore(info, rank, parallel.ray_cpus_per_worker, secret))
