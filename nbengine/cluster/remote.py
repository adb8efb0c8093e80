"""Processes on other machines, as their owner sees them."""

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
from nbengine.errors import EngineStartError
from nbengine.runtime.processes import child_environment, describe_status, engine_command

logger = logging.getLogger(__name__)

BRIDGE_GRACE = 5.0
"""Seconds that the bridge gets to leave the cluster."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
LOST = 1
"""Exit status of a process that cannot be reached any more."""
KILLERS = "the kernel's out-of-memory killer ends processes so, and Ray those of a node that goes down"

News = KeeperToOwner | Lost
Listener = Callable[["RemoteProcess", News], None]
"""A callback for news of a process, called on the thread that reads the bridge's messages."""


class RemoteProcess:
    """A process that a keeper keeps; `listener` is called with all news of it."""

    def __init__(self, cluster: Cluster, group: int, index: int, listener: Listener) -> None:
        self._cluster = cluster
        self._group = group
        self._index = index
        self._listener = listener
        self._ended = threading.Event()
        self.placed: Placed | None = None
        """The place where it runs; None until it has one."""
        self.pid = 0
        """Its pid on its machine; 0 before it has started."""
        self.status: int | None = None
        """Its exit status, as `Popen.returncode`; None while it has not ended."""
        self.end = ""
        """The way in which it ended, as in "was killed by signal 9 (SIGKILL)"."""
        self.log_tail = ""
        """The last lines of its log, once it has ended."""

    @property
    def has_ended(self) -> bool:
        """Tell whether the process has ended, or was never started."""
        return self.status is not None

    def send(self, message: OwnerToKeeper) -> None:
        """Send the process's keeper a message; this has no effect when it is gone."""
        self._cluster.tell(ToKeeper(self._group, self._index, msgspec.msgpack.encode(message)))

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, with no effect when it has ended;
        one that has not started never will.

        The other processes of its group that have not started never will, either.
        """
        if self.pid:
            self.send(Signal(number))
        else:
            self._cluster.release(self._group)

    def finish(self) -> None:
        """End the process if it still runs; if it has not started, end its whole group."""
        if self.pid:
            self.send(End())
        else:
            self._cluster.release(self._group)

    def give_back(self) -> None:
        """Give the room of the process's group back; processes that still run end."""
        self._cluster.release(self._group)

    def wait(self, timeout: float | None) -> bool:
        """Wait for the process's end, for `timeout` seconds at most; return whether it has come."""
        return self._ended.wait(timeout)

    def note(self, message: News) -> None:
        """Take in news of the process."""
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
    """A Ray cluster that is reached through a bridge, which outlives this process for a moment.

    `run_dir` is the run directory of the engine whose host this process is: the bridge removes the engine's
    files if this process does not.

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
        """The cluster's address, as every node of it knows it; empty until the bridge has connected."""
        theirs, ours = socket.socketpair()
        with theirs, ours:
            options = [] if run_dir is None else [f"--run-dir={run_dir}"]
            arguments = [str(theirs.fileno()), name, *([address] if address else [])]
            self._bridge = subprocess.Popen(
                engine_command("bridge", *options, *arguments),
                stdin=subprocess.DEVNULL,
                # Ray writes there of every failure in the cluster.
                stdout=subprocess.DEVNULL,
                env=child_environment() | QUIET,
                pass_fds=(theirs.fileno(),),
                # Ray's workers look for modules in the driver's working directory.
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
        """Ask for a place for each of a group of processes; each listener gets the news of its process."""
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
        """Give the room of a group back; its processes that still run end. Another call does nothing."""
        self.tell(Release(group))

    def tell(self, message: OwnerToBridge) -> None:
        """Send the bridge a message; this has no effect when it is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def close(self) -> None:
        """Leave the cluster; processes that still run there end."""
        with (
            self._lock,
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            # The other end would not see it closed while the reader of this end still waits on it.
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
