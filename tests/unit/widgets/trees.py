"""Process trees made up for tests."""

from __future__ import annotations

from collections.abc import Collection

from nbengine.client.observe.process_usage import ProcessUsage
from nbengine.config import ParallelConfig
from nbengine.ipc.control_messages import WorkerInfo
from nbengine.widgets.processes.tree import CoreNode, ProcessTree, WorkerNode

OWN, HOST, FIRST_CORE = 900, 1000, 1001
LAYERS_A_STAGE = 15


def usage(pid: int, title: str, gone: Collection[int] = ()) -> ProcessUsage:
    """A process that uses what all of them use, or that is gone."""
    return ProcessUsage(pid) if pid in gone else ProcessUsage(pid, title, True, 100 << 20, 1.25, 12)


def make_tree(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    *,
    frontends: int = 1,
    gone: Collection[int] = (),
    others: int = 0,
    device: str = "cpu",
    inside: bool = False,
    alone: bool = False,
    name: str = "tiny",
    first_pid: int = FIRST_CORE,
) -> ProcessTree:
    """The tree of an engine: core, its workers, the next core, and so on in the order of their pids.

    `inside`: the workers are in their engine core's process; `alone`: the engine core is in the frontend's.
    """
    pid = first_pid
    cores = []
    for rank in range(dp):
        core = usage(OWN, "python3 script.py") if alone else usage(pid, f"nbengine: core {rank} {name}", gone)
        workers = []
        for number in range(tp * pp):
            pid += 1
            process = core if inside else usage(pid, f"nbengine: worker {number} {name}", gone)
            first_layer = number // tp * LAYERS_A_STAGE
            info = WorkerInfo(
                number,
                number % tp,
                number // tp,
                process.pid,
                device if device == "cpu" else f"{device}:{number}",
                500 << 20,
                2 << 30,
                first_layer,
                LAYERS_A_STAGE,
                "ShmCommunicator" if device == "cpu" else "TorchCommunicator",
                "ShmLink" if device == "cpu" else "TorchLink",
            )
            workers.append(WorkerNode(process, info))
        cores.append(CoreNode(core, rank, tuple(workers)))
        pid += 1
    return ProcessTree(
        engine=name,
        model=name,
        parallel=ParallelConfig(tp, pp, dp),
        frontends=tuple(usage(OWN + number, "python3 -m ipykernel_launcher") for number in range(frontends)),
        host=None if alone else usage(HOST, f"nbengine: host {name}", gone),
        cores=tuple(cores),
        others=tuple(usage(2000 + number, "nbengine: something else") for number in range(others)),
        own_pid=OWN,
    )
