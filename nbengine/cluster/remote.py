"""Processes on other machines, for who owns them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import logging
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from nbengine.cluster.messages import (
    BridgeToOwner,
    Connected,
    End,
    Exited,
    Failed,
    FromKeeper,
    KeeperToOwner,
    Lost,
    NoCluster,
    OwnerToBridge,
    OwnerToKeeper,
    Placed,
    Release,
    Reserve,
    Signal,
    Started,
    ToKeeper,
)
from nbengine.engine.processes import child_environment, describe_status, engine_command
from nbengine.errors import EngineStartError

logger = logging.getLogger(__name__)

BRIDGE_GRACE = 5.0
"""Seconds that the bridge gets to leave the cluster."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
LOST = 1
"""Exit status of a process that cannot be reached any more."""
KILLERS = "the kernel's out-of-memory killer ends processes so, and Ray those of a node that goes down"

News = KeeperToOwner | Lost
Listener = Callable[["RemoteProcess", News], None]
"""Called on the thread that reads what the bridge says."""


class RemoteProcess:
    """A process that a keeper keeps; `listener` hears all that becomes known of it."""

    def __init__(self, cluster: Cluster, group: int, index: int, listener: Listener) -> None:
        self._cluster = cluster
        self._group = group
        self._index = index
        self._listener = listener
        self._ended = threading.Event()
        self.placed: Placed | None = None
        """Where it is; None until it has a place."""
        self.pid = 0
        """On its machine; 0 before it has started."""
        self.status: int | None = None
        """As `Popen.returncode`."""
        self.end = ""
        """How it ended, as in "was killed by signal 9 (SIGKILL)"."""
        self.log_tail = ""
        """The last lines of its log, once it has ended."""

    @property
    def has_ended(self) -> bool:
        """Whether it has, or was never started."""
        return self.status is not None

    def send(self, message: OwnerToKeeper) -> None:
        """Tell its keeper something; of no effect when it is gone."""
        self._cluster.tell(ToKeeper(self._group, self._index, msgspec.msgpack.encode(message)))

    def send_signal(self, number: int) -> None:
        """Signal it; of no effect when it has ended. One that has not started, will not, with those of its group."""
        if self.pid:
            self.send(Signal(number))
        else:
            self._cluster.release(self._group)

    def finish(self) -> None:
        """Have it end, if it still runs; if it has not started, with those of its group."""
        if self.pid:
            self.send(End())
        else:
            self._cluster.release(self._group)

    def give_back(self) -> None:
        """Give its group's room back; those that still run end."""
        self._cluster.release(self._group)

    def wait(self, timeout: float | None) -> bool:
        """Wait for its end, for `timeout` seconds at most; whether it has come."""
        return self._ended.wait(timeout)

    def note(self, message: News) -> None:
        """Take in news of it."""
        if self.has_ended:
            return
        match message:
            case Placed():
                self.placed = message
            case Started(pid):
                self.pid = pid
            case Exited(status, log_tail):
                self.log_tail = log_tail
                self._note_end(status, describe_status(status, KILLERS))
            case Failed(cause):
                self._note_end(LOST, f"could not be started{self._where}: {cause}")
            case Lost(_, _, cause):
                doing = "was lost" if self.pid else "could not be started"
                self._note_end(LOST, f"{doing}{self._where}: {cause}")
        self._listener(self, message)
        if isinstance(message, (Exited, Failed, Lost)):
            self._ended.set()

    def _note_end(self, status: int, how: str) -> None:
        self.end = how
        self.status = status

    @property
    def _where(self) -> str:
        return "" if self.placed is None else f" on {self.placed.hostname} ({self.placed.address})"


class Cluster:
    """A Ray cluster, by way of a bridge, which outlives this process for a moment.

    `run_dir` is that of the engine whose host this process is: the bridge removes the engine's files if it does not.

    Raises:
        EngineStartError: Ray is not installed.
    """

    def __init__(self, address: str | None, name: str, run_dir: str | None = None) -> None:
        if importlib.util.find_spec("ray") is None:
            raise EngineStartError('Ray is not installed here: pip install "nbengine[ray]"')
        self._numbers = itertools.count()
        self._groups: dict[int, list[RemoteProcess]] = {}
        self._lock = threading.Lock()
        self._end: str | None = None
        self._connected = threading.Event()
        self.address = ""
        """Where the cluster is, for every node of it; empty until `connect` returns."""
        theirs, ours = socket.socketpair()
        with theirs, ours:
            options = [] if run_dir is None else [f"--run-dir={run_dir}"]
            arguments = [str(theirs.fileno()), name, *([address] if address else [])]
            self._bridge = subprocess.Popen(
                engine_command("bridge", *options, *arguments),
                stdin=subprocess.DEVNULL,
                # Where Ray tells of all that goes wrong in the cluster.
                stdout=subprocess.DEVNULL,
                env=child_environment() | QUIET,
                pass_fds=(theirs.fileno(),),
                # Ray has its workers look for modules where the driver runs.
                cwd="/",
            )
            self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._reader = threading.Thread(target=self._read, name="nbengine-cluster", daemon=True)
        self._reader.start()

    def start(
        self,
        bundles: Sequence[Mapping[str, float]],
        patience: float,
        label: str,
        listeners: Sequence[Listener],
    ) -> list[RemoteProcess]:
        """Ask for a place for each of a group of processes; what becomes of each its listener is told."""
        group = next(self._numbers)
        processes = [RemoteProcess(self, group, index, listener) for index, listener in enumerate(listeners)]
        with self._lock:
            end = self._end
            self._groups[group] = processes
        if end is not None:
            self._lose(group, None, end)
        else:
            self.tell(Reserve(group, [dict(bundle) for bundle in bundles], patience, label))
        return processes

    def release(self, group: int) -> None:
        """Give the room of a group back; those that still run end. Again does nothing."""
        self.tell(Release(group))

    def tell(self, message: OwnerToBridge) -> None:
        """Send the bridge a message; of no effect when it is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """Leave the cluster; processes that still run there end."""
        with (
            self._lock,
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            # Closing it would not be seen at the other end, as long as the reader waits for something to come.
            end.shutdown(socket.SHUT_WR)
        try:
            self._bridge.wait(BRIDGE_GRACE)
        except subprocess.TimeoutExpired:
            self._bridge.kill()
            self._bridge.wait()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        decoder: msgspec.msgpack.Decoder[BridgeToOwner] = msgspec.msgpack.Decoder(BridgeToOwner)
        keeper_decoder: msgspec.msgpack.Decoder[KeeperToOwner] = msgspec.msgpack.Decoder(KeeperToOwner)
        cause = ""
        with contextlib.suppress(EOFError, OSError):
            while True:
                match decoder.decode(self._connection.recv_bytes()):
                    case Connected(address):
                        self.address = address
                    case NoCluster(why):
                        cause = why
                    case FromKeeper(group, index, message):
                        self._groups[group][index].note(keeper_decoder.decode(message))
                    case Lost(group, index, why):
                        self._lose(group, index, why)
        with self._lock:
            self._end = cause or "the connection to the Ray cluster has ended"
            groups = list(self._groups)
        for group in groups:
            self._lose(group, None, self._end)

    def _lose(self, group: int, index: int | None, cause: str) -> None:
        processes = self._groups[group]
        for process in processes if index is None else [processes[index]]:
            process.note(Lost(group, index, cause))
