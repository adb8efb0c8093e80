"""Engine cores on the nodes of an existing Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from nbengine.client.connection import ConnectionInfo
from nbengine.cluster.messages import Placed, RunCore
from nbengine.cluster.remote import Cluster, News, RemoteProcess
from nbengine.cluster.resources import core_bundle
from nbengine.engine.processes import CoreHandle

logger = logging.getLogger(__name__)


class RayCore:
    """An engine core on some node of a cluster. It starts as soon as the cluster has room for it."""

    def __init__(
        self, cluster: Cluster, info: ConnectionInfo, rank: int, incarnation: int, on_exit: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self._cluster = cluster
        self._info = info
        self._on_exit = on_exit
        parallel = info.config.parallel
        label = f"{Path(info.log_path).stem}.core{rank}.{incarnation}"
        bundles = [core_bundle(info.config)]
        [self._process] = cluster.start(bundles, parallel.ray_timeout, label, [self._on_news])

    @property
    def pid(self) -> int:
        return self._process.pid

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
            where = f"{message.hostname} ({message.address}), log {message.log_path}"
            logger.info("engine core %d has a place on %s", self.rank, where)
            process.send(RunCore(self._info_there(message), self.rank))
        elif process.status is not None:
            self._cluster.release([process])
            self._on_exit()

    def _info_there(self, place: Placed) -> ConnectionInfo:
        """What the core needs to know, with its own directories, and the cluster's address for its executor."""
        config = self._info.config
        parallel = replace(config.parallel, ray_address=self._cluster.address)
        return msgspec.structs.replace(
            self._info,
            run_dir=place.run_dir,
            tensor_dir=place.tensor_dir,
            log_path=place.log_path,
            config=replace(config, parallel=parallel),
        )


class RayLauncher:
    """Starts every engine core on a node that has room for it and all of its workers.

    `on_exit` is called on a thread of this object's when a core has ended or turned out to have no place.

    Raises:
        EngineStartError: Ray is not installed.
    """

    def __init__(self, info: ConnectionInfo, on_exit: Callable[[], None]) -> None:
        self._info = info
        self._on_exit = on_exit
        self._cluster = Cluster(info.config.parallel.ray_address, info.name, info.run_dir)

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        return RayCore(self._cluster, self._info, rank, incarnation, self._on_exit)

    def close(self) -> None:
        self._cluster.close()
