"""The messages between the owner of remote processes, the bridge to the cluster,
and the keepers on its nodes.

An *owner* (an engine's host, or an engine core with remote workers) starts a *bridge*, which is a driver of
the Ray cluster. For each process that the owner wants the bridge has an actor on some node, and the actor a
*keeper* there, the parent of the process. Bridge and actor only pass on the messages of owner and keeper.
"""

from __future__ import annotations

import msgspec

from nbengine.ipc.control_messages import WorkerPulse
from nbengine.metrics.stats import WorkerStats
from nbengine.runtime.connection import ConnectionInfo
from nbengine.runtime.directories import EngineDirectories

BOARD = "board"
"""The name of the file with a worker's measurements, in its directory."""


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Owner to bridge: make room for a group of processes, and start a keeper for each.

    `bundles` are Ray resources, one bundle for each process, and no bundle is divided between nodes.
    `patience` is the time to wait for room, in seconds.
    """

    group: int
    bundles: list[dict[str, float]]
    patience: float
    label: str
    """The engine or core that owns the processes, for the names of log files on the nodes."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Owner to bridge: end a group, and give its room back."""

    group: int


class ToKeeper(msgspec.Struct, frozen=True, tag=True):
    """Owner to bridge: a message for a keeper."""

    group: int
    index: int
    message: bytes


class Connected(msgspec.Struct, frozen=True, tag=True):
    """Bridge to owner, once: it belongs to the cluster at `address`, as seen from every node."""

    address: str


class FromKeeper(msgspec.Struct, frozen=True, tag=True):
    """Bridge to owner: a keeper's message."""

    group: int
    index: int
    message: bytes


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Bridge to owner: a process of a group (all if `index` is None) was never started or is out of reach.

    `cause` says why.
    """

    group: int
    index: int | None
    cause: str


class NoCluster(msgspec.Struct, frozen=True, tag=True):
    """Bridge to owner: the cluster was not found or is gone; the bridge ends."""

    cause: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner, once: the keeper's node, and directories (0700) for the process,
    which it removes at the end."""

    node: str
    """Ray's id of the node."""
    hostname: str
    address: str
    """The address at which other nodes reach this node."""
    port: int
    """A TCP port of the node that was free a moment ago."""
    run_dir: str
    tensor_dir: str
    marker: str
    """The marker in both directories."""
    log_path: str

    @property
    def directories(self) -> EngineDirectories:
        """Return the directories that the keeper has made."""
        return EngineDirectories(self.run_dir, self.tensor_dir, self.marker)

    @property
    def tcp_address(self) -> str:
        """Return the address where processes may meet on the node: a `distributed_init_method`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


class RunCore(msgspec.Struct, frozen=True, tag=True):
    """Owner to keeper: start an engine core."""

    info: ConnectionInfo
    rank: int
    threads: int
    """Threads of each worker."""
    secret: bytes
    """The secret that lets the host recognise the engine core."""


class RunWorker(msgspec.Struct, frozen=True, tag=True):
    """Owner to keeper: start a worker, and give it `spec`, a pickled `WorkerSpec`,
    as the first thing on its line."""

    spec: bytes
    rank: int
    num_workers: int
    directory: str
    """The name of a directory to be made inside the tensor directory;
    all workers of the group have the same."""
    threads: int


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Owner to keeper: send the process a signal."""

    number: int


class End(msgspec.Struct, frozen=True, tag=True):
    """Owner to keeper: the process is not needed any more; it ends."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner: the process runs."""

    pid: int


class Line(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner: a pickled message from a worker's line; empty: the line has ended."""

    message: bytes


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner: a worker's measurements of itself, and its counts."""

    stats: WorkerStats
    pulse: WorkerPulse


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner, the last: how the process ended, as `Popen.returncode`,
    and the last lines of its log."""

    status: int
    log_tail: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner, the last: the process could not be started; `cause` says why."""

    cause: str


OwnerToBridge = Reserve | Release | ToKeeper
BridgeToOwner = Connected | FromKeeper | Lost | NoCluster
OwnerToKeeper = RunCore | RunWorker | Signal | End
KeeperToOwner = Placed | Started | Line | Measured | Exited | Failed
