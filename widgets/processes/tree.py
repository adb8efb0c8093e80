"""The processes of a running engine and their connections: one structure, shown as text and as a picture.

It is made from what the engine has told about itself (`ConnectionInfo`, `EngineReady`) and from the processes
as the system has them now.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from nbengine.client.engines.processes import session_processes
from nbengine.client.observe.process_usage import ProcessUsage, client_pids, printable, usage_of
from nbengine.config import EngineConfig, ParallelConfig
from nbengine.ipc.control_messages import EngineReady, WorkerInfo
from nbengine.runtime.connection import ConnectionInfo, newest

CLIENT_TO_HOST = "host.sock: DEALER ↔ ROUTER"
STATS = ("stats.sock: SUB (on demand) ← XPUB", "stats.sock: XSUB ↔ XPUB")
"""The channels with one engine core, and with a client that balances or wakes several engine cores."""
CLIENT_TO_CORE = ("c-<id>.in: ROUTER → DEALER", "c-<id>.out: PULL ← PUSH")
HOST_TO_CORE = ("core.sock: ROUTER ↔ DEALER", "back-out.sock: PULL ← PUSH", "pipe: each sees the other's end")
WAVES = "back-pub.sock: XPUB → SUB"
"""The channel to engine cores in lock step."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection of processes, given by their pids: every source with every target.

    `kind` is "host" or "requests" (of a frontend), "control" (host and engine core), "queues" (engine core
    and workers), "tensor" (the tensor-parallel group of a stage: sources and targets are the same) or
    "pipeline" (a rank of a stage and the same of the next). `channels` has a line of text for each
    connection.
    """

    kind: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    channels: tuple[str, ...]
    is_intact: bool = True
    """There still is a process at each end."""


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """A worker; `process` is its engine core's where the worker has no separate one."""

    process: ProcessUsage
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class CoreNode:
    """An engine core and its workers by rank."""

    process: ProcessUsage
    rank: int
    workers: tuple[WorkerNode, ...] = ()

    @property
    def outside(self) -> tuple[WorkerNode, ...]:
        """Return the workers that run in separate processes."""
        return tuple(worker for worker in self.workers if worker.process.pid != self.process.pid)

    @property
    def stages(self) -> tuple[tuple[WorkerNode, ...], ...]:
        """Return the workers in separate processes: a tensor-parallel group for each pipeline stage."""
        ranks = sorted({worker.info.pp_rank for worker in self.outside})
        return tuple(
            tuple(worker for worker in self.outside if worker.info.pp_rank == rank) for rank in ranks
        )


@dataclass(frozen=True, slots=True)
class ProcessTree:
    """An engine's processes at one moment; those that have ended are kept, with `is_running` False.

    `str(tree)` is a tree of text, `tree.svg()` a picture; a notebook shows the picture.
    """

    engine: str
    model: str
    parallel: ParallelConfig
    frontends: tuple[ProcessUsage, ...]
    """Processes with a client of the engine; this process is the first if it has one."""
    host: ProcessUsage | None
    """The host's process; None where the engine core is in the frontend's process."""
    cores: tuple[CoreNode, ...]
    others: tuple[ProcessUsage, ...] = ()
    """Further processes of the engine."""
    lock_step: bool = False
    """The engine cores step together."""
    own_pid: int = field(default_factory=os.getpid)
    """The pid of the process that has made the tree."""

    @property
    def workers(self) -> tuple[WorkerNode, ...]:
        """Return the workers of all engine cores, by rank."""
        return tuple(worker for core in self.cores for worker in core.workers)

    @property
    def processes(self) -> tuple[ProcessUsage, ...]:
        """Return every process once: frontends, host, engine cores and workers, others."""
        found: dict[int, ProcessUsage] = {process.pid: process for process in self.frontends}
        if self.host is not None:
            found[self.host.pid] = self.host
        for core in self.cores:
            found.setdefault(core.process.pid, core.process)
            for worker in core.workers:
                found.setdefault(worker.process.pid, worker.process)
        found.update((process.pid, process) for process in self.others)
        return tuple(found.values())

    @property
    def engine_processes(self) -> tuple[ProcessUsage, ...]:
        """Return the processes that belong to the engine, without frontends."""
        frontends = {process.pid for process in self.frontends}
        return tuple(process for process in self.processes if process.pid not in frontends)

    @property
    def links(self) -> tuple[Link, ...]:
        """Return the connections of the processes, also those of processes that have ended."""
        running = {process.pid for process in self.processes if process.is_running}
        return tuple(replace(link, is_intact=_is_intact(link, running)) for link in _links(self))

    def svg(self) -> str:
        """Draw a picture that stands by itself, as in a file: on its own ground, dark in a dark system."""
        from nbengine.widgets.processes.tree_svg import draw

        return draw(self, standalone=True)

    def html(self) -> str:
        """Render the picture in the colours of its page, and below it the text, folded."""
        from nbengine.widgets.processes.tree_svg import page_part

        return page_part(self)

    def __str__(self) -> str:
        from nbengine.widgets.processes.tree_text import text_tree

        return text_tree(self)

    def bundle(self) -> dict[str, str]:
        """Render all forms, by MIME type."""
        return {"text/plain": str(self), "text/html": self.html(), "image/svg+xml": self.svg()}

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return self.bundle()


def read_process_tree(info: ConnectionInfo, *, attached: bool = True) -> ProcessTree:
    """Read the processes of an engine; `attached`: this process has a client of it."""
    info = newest(info)
    own, host = os.getpid(), info.host_pid
    clients = [own] if attached else []
    clients += [pid for pid in client_pids(info) if pid not in clients]
    look = partial(usage_of, session=host)
    cores = tuple(_core_node(engine, look(engine.pid), look) for engine in info.ready)
    known = {host, *(process.pid for core in cores for process in _processes_of(core))}
    others = [look(process.pid) for process in session_processes(info) if process.pid not in known]
    return ProcessTree(
        engine=printable(info.name),
        model=printable(info.config.model.model),
        parallel=info.config.parallel,
        frontends=tuple(map(usage_of, clients)),
        host=look(host) if info.host_alive else ProcessUsage(host),
        cores=cores,
        others=tuple(process for process in others if process.is_running),
        lock_step=info.config.lock_step,
    )


def read_own_process_tree(config: EngineConfig, ready: EngineReady) -> ProcessTree:
    """Read the processes of an engine whose core is in this process, and of its workers."""
    own = usage_of(os.getpid())
    return ProcessTree(
        engine="in this process",
        model=printable(config.model.model),
        parallel=config.parallel,
        frontends=(own,),
        host=None,
        cores=(_core_node(ready, own, partial(usage_of, parent=own.pid)),),
    )


def _core_node(engine: EngineReady, process: ProcessUsage, look: Callable[[int], ProcessUsage]) -> CoreNode:
    workers = [
        WorkerNode(process if worker.pid == engine.pid else look(worker.pid), worker)
        for worker in engine.workers
    ]
    return CoreNode(process, engine.rank, tuple(workers))


def _processes_of(core: CoreNode) -> list[ProcessUsage]:
    return [core.process, *(worker.process for worker in core.workers)]


def _links(tree: ProcessTree) -> Iterator[Link]:
    clients = tuple(process.pid for process in tree.frontends)
    if tree.host is not None and clients:
        follows = tree.lock_step or len(tree.cores) > 1
        yield Link("host", clients, (tree.host.pid,), (CLIENT_TO_HOST, STATS[follows]))
    for core in tree.cores:
        pid = (core.process.pid,)
        if tree.host is not None:
            if clients:
                yield Link("requests", clients, pid, CLIENT_TO_CORE)
            channels = (*HOST_TO_CORE, WAVES) if tree.lock_step else HOST_TO_CORE
            yield Link("control", (tree.host.pid,), pid, channels)
        if core.outside:
            workers = tuple(worker.process.pid for worker in core.outside)
            yield Link("queues", pid, workers, _queues(len(workers)))
        yield from _links_between_workers(core)


def _is_intact(link: Link, running: set[int]) -> bool:
    if link.kind == "tensor":
        return len(running.intersection(link.sources)) > 1
    return not running.isdisjoint(link.sources) and not running.isdisjoint(link.targets)


def _queues(readers: int) -> tuple[str, ...]:
    rings = "a ring" if readers == 1 else "a ring each"
    return (
        f"rpc_broadcast_mq: shared-memory ring, 1 writer → {readers}",
        f"worker_response_mq: {rings}",
    )


def _links_between_workers(core: CoreNode) -> Iterator[Link]:
    stages = core.stages
    for group in stages:
        if len(group) > 1:
            pids = tuple(worker.process.pid for worker in group)
            info = group[0].info
            yield Link("tensor", pids, pids, (f"all-reduce by {_channel(info.communicator, info.device)}",))
    for stage, following in itertools.pairwise(stages):
        for sender, receiver in zip(stage, following, strict=False):
            channel = _channel(sender.info.link, sender.info.device)
            yield Link("pipeline", (sender.process.pid,), (receiver.process.pid,), (channel,))


def _channel(kind: str, device: str) -> str:
    """Describe the path of tensors: the class at both ends, and the transport."""
    if not kind:
        return "not told"
    if kind.startswith("Shm"):
        return f"{kind}: shared memory"
    if kind.startswith("Torch"):
        return f"{kind}: {'gloo' if device == 'cpu' else 'NCCL'}"
    return kind
