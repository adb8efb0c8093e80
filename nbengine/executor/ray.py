"""The executor whose workers run on the nodes of an existing Ray cluster."""

from __future__ import annotations

import logging
import pickle
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from nbengine.cluster.messages import BOARD, Placed, RunWorker
from nbengine.cluster.remote import Cluster
from nbengine.cluster.resources import worker_bundle
from nbengine.cluster.worker import RemoteWorker
from nbengine.config import EngineConfig
from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError
from nbengine.executor.multiproc import TAIL_LINES, MultiprocExecutor
from nbengine.executor.watch import Watched
from nbengine.executor.worker_proc import WorkerSpec
from nbengine.ipc.control_messages import WorkerPulse
from nbengine.ipc.queues.message_queue import MessageQueue
from nbengine.ipc.transport import any_port, own_address
from nbengine.metrics.stats import WorkerStats

logger = logging.getLogger(__name__)

TAIL_SECONDS = 1.0
"""Seconds to wait for the end of a worker that has failed, and the last lines of its log."""


class RayExecutor(MultiprocExecutor):
    """An executor with one process for each rank, on nodes that have room.

    Neighbouring ranks share a node as far as possible.

    Calls and answers go over TCP, encrypted and authenticated. Workers of different nodes send each other
    data through torch.distributed, which is neither. A call does not wait for room on its way to the workers:
    the number of calls under way is bounded by the steps in flight, each of which is answered.
    """

    _cluster: Cluster | None = None

    def _complete_config(self, config: EngineConfig) -> EngineConfig:
        """Find a place for every worker, and an address where they meet."""
        self._cluster = Cluster(config.parallel.ray_address, self._files.engine)
        found = self._find_places(self._cluster, config)
        self._remote = [worker for worker, _ in found]
        self._places = [place for _, place in found]
        self._token = secrets.token_hex(8)
        parallel = config.parallel
        if parallel.distributed_init_method is None:
            parallel = replace(parallel, distributed_init_method=self._places[0].tcp_address)
        return replace(config, parallel=parallel)

    def _find_places(self, cluster: Cluster, config: EngineConfig) -> list[tuple[RemoteWorker, Placed]]:
        workers = [RemoteWorker() for _ in self._layouts]
        label = Path(self._files.log or "engine.log").stem
        bundles = [worker_bundle(config) for _ in workers]
        cluster.start(bundles, config.parallel.ray_timeout, label, [worker.note for worker in workers])
        found = []
        for worker in workers:
            place = worker.place()
            if place is None:
                raise EngineStartError(f"a worker {worker.end}")
            found.append((worker, place))
        order = node_order([place.node for _, place in found])
        return sorted(found, key=lambda item: order.index(item[1].node))

    def _make_call_queue(self) -> MessageQueue:
        return MessageQueue(
            len(self._layouts),
            0,
            directory=self._files.shared_memory,
            socket_directory=self._files.sockets,
            remote_address=any_port(own_address(self._places[0].address)),
        )

    def _start_processes(self, specs: Sequence[WorkerSpec], on_start: Callable[[], None]) -> None:
        on_start()
        for spec in specs:
            self._start_worker(spec.layout, spec)

    def _start_worker(self, layout: RankLayout, spec: WorkerSpec) -> None:
        worker, place = self._remote[layout.rank], self._places[layout.rank]
        directory = f"{place.tensor_dir}/{self._token}"
        files = replace(
            spec.files,
            sockets=place.run_dir,
            shared_memory=directory,
            log=place.log_path,
            board=f"{directory}/{BOARD}",
        )
        spec = replace(
            spec,
            files=files,
            # The worker removes them itself if its keeper is killed.
            own_directories=place.directories,
            answer_address=any_port(place.address),
        )
        self._workers.append(Watched(layout, worker, worker.connection))
        logger.info(
            "worker %d runs on %s (%s), log %s", layout.rank, place.hostname, place.address, place.log_path
        )
        if worker.process is not None:
            threads = spec.config.parallel.ray_cpus_per_worker
            message = RunWorker(pickle.dumps(spec), layout.rank, layout.world_size, self._token, threads)
            worker.process.send(message)

    def worker_stats(self) -> list[WorkerStats]:
        return [worker.stats or WorkerStats(rank, 0, 0, 0.0) for rank, worker in enumerate(self._remote)]

    def worker_pulses(self) -> list[WorkerPulse]:
        return [worker.pulse or WorkerPulse(rank, 0) for rank, worker in enumerate(self._remote)]

    def _log_tail(self, layout: RankLayout) -> str:
        lines = self._remote[layout.rank].log_tail(TAIL_SECONDS).splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def shutdown(self) -> None:
        super().shutdown()
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()


def node_order(nodes: Sequence[str]) -> list[str]:
    """Order the nodes of a group's processes by their number of processes,
    so that pipeline stages divide few of them."""
    return sorted(dict.fromkeys(nodes), key=nodes.count, reverse=True)
