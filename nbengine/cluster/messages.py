"""What the owner of remote processes, the bridge to the cluster, and the keepers on its nodes say to each other.

An *owner* (an engine's host, or an engine core with remote workers) starts a *bridge*, which is a driver of the Ray
cluster. For each process that the owner wants the bridge has an actor on some node, and the actor a *keeper* there, the
parent of the process. Bridge and actor only pass on what owner and keeper say.
"""

from __future__ import annotations

import msgspec

from nbengine.client.connection import ConnectionInfo
from nbengine.metrics.stats import WorkerStats

BOARD = "board"
"""Name of the file with what a worker measures, in its directory."""


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Owner to bridge: make room for a group of processes, and start a keeper for each.

    `bundles` are Ray resources, one bundle a process, none of which is divided between nodes. `patience` is how many
    seconds to wait for room.
    """

    group: int
    bundles: list[dict[str, float]]
    patience: float
    label: str
    """Whose processes they are, for the log files of the nodes."""


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
    """Bridge to owner: a process of a group, all of them if `index` is None, was never started or cannot be reached any
    more; `cause` says why."""

    group: int
    index: int | None
    cause: str


class NoCluster(msgspec.Struct, frozen=True, tag=True):
    """Bridge to owner: there is no cluster, or no more; the bridge ends."""

    cause: str


class Placed(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner, once: where it runs, and directories (0700) for the process, which it removes at the end."""

    node: str
    """Ray's id of the node."""
    hostname: str
    address: str
    """The node's address, that other nodes reach it by."""
    port: int
    """A TCP port there that was free a moment ago."""
    run_dir: str
    tensor_dir: str
    log_path: str

    @property
    def tcp_address(self) -> str:
        """Where processes may meet at it: a `distributed_init_method`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


class RunCore(msgspec.Struct, frozen=True, tag=True):
    """Owner to keeper: start an engine core."""

    info: ConnectionInfo
    rank: int
    threads: int
    """Of each worker."""


class RunWorker(msgspec.Struct, frozen=True, tag=True):
    """Owner to keeper: start a worker, and give it `spec`, a pickled `WorkerSpec`, as the first thing on its line."""

    spec: bytes
    rank: int
    num_workers: int
    directory: str
    """Inside the tensor directory, to be made: its name is one that all workers of the group have in common."""
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
    """Keeper to owner: what a worker has said on its line, pickled; empty: the line has ended."""

    message: bytes


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner: what a worker has measured of itself."""

    stats: WorkerStats


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner, the last: how the process ended, as `Popen.returncode`, and the last lines of its log."""

    status: int
    log_tail: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Keeper to owner, the last: the process could not be started; `cause` says why."""

    cause: str


OwnerToBridge = Reserve | Release | ToKeeper
BridgeToOwner = Connected | FromKeeper | Lost | NoCluster
OwnerToKeeper = RunCore | RunWorker | Signal | End
KeeperToOwner = Placed | Started | Line | Measured | Exited | Failed
