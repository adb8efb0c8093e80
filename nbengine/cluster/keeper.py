"""The keeper: parent of one process of an engine on a node of a cluster.

It does for the process what a host does for an engine core on its machine, and what an engine core does for its workers:
gives it directories, watches it, says how it ended, ends it when nobody wants it any more, and removes what it leaves.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import shutil
import socket
import sys
import threading
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from nbengine.client.connection import new_run_dir
from nbengine.cluster.child import Child, core_child, worker_child
from nbengine.cluster.messages import (
    BOARD,
    End,
    Exited,
    Failed,
    KeeperToOwner,
    Line,
    Measured,
    OwnerToKeeper,
    Placed,
    RunCore,
    RunWorker,
    Signal,
    Started,
)
from nbengine.cluster.node_logs import new_node_log
from nbengine.engine.logs import configure_logging, describe_exception, log_tail
from nbengine.errors import NBEngineError
from nbengine.executor.worker_board import WorkerBoard
from nbengine.ipc.shm_tensors import new_tensor_dir
from nbengine.metrics.stats import WorkerStats

logger = logging.getLogger(__name__)

END_GRACE = 2.0
"""Seconds that a process gets to end once its owner is gone or lets go of it; then it is killed with what it has started."""


MEASURE_SECONDS = 0.5
"""Between two looks at what a worker has measured."""
PORTS = range(20000, 32768)
"""Where a free port is looked for: the kernel gives out others to whoever asks for any."""


class Keeper:
    """Keeps one process, for the owner at the other end of `connection`."""

    def __init__(self, connection: Connection[Any, Any], node: str, address: str, label: str) -> None:
        self._connection = connection
        self._log_path = new_node_log(label)
        _redirect_output(self._log_path)
        port = _free_port(address)
        self._run_dir = new_run_dir()
        self._tensor_dir = new_tensor_dir(self._run_dir)
        self._placed = Placed(
            node=node,
            hostname=socket.gethostname(),
            address=address,
            port=port,
            run_dir=str(self._run_dir),
            tensor_dir=str(self._tensor_dir),
            log_path=str(self._log_path),
        )
        self._decoder: msgspec.msgpack.Decoder[OwnerToKeeper] = msgspec.msgpack.Decoder(OwnerToKeeper)
        self._child: Child | None = None
        self._line: Connection[Any, Any] | None = None
        self._has_ended, self._notice = os.pipe()
        self._board: WorkerBoard | None = None
        self._rank = 0
        self._measured: WorkerStats | None = None

    def run(self) -> None:
        """Keep the process until it has ended, or the owner is gone."""
        try:
            self._tell(self._placed)
            while self._turn():
                pass
        except (EOFError, OSError):
            logger.info("the owner of this process is gone, or needs it no more")
        finally:
            if self._child is not None:
                self._child.end(END_GRACE)
            for directory in (self._tensor_dir, self._run_dir):
                shutil.rmtree(directory, ignore_errors=True)

    def _turn(self) -> bool:
        """Handle what comes next; returns whether there is more to do."""
        line = self._line
        sources = [source for source in (self._connection, self._has_ended, line) if source is not None]
        ready = wait(sources, None if self._board is None else MEASURE_SECONDS)
        self._report_measures()
        if line is not None and line in ready:
            self._relay(line)
        if self._connection in ready:
            return self._obey(self._decoder.decode(self._connection.recv_bytes()))
        if self._has_ended in ready and self._child is not None:
            while self._line is not None:
                self._relay(self._line)
            status = self._child.end(0)
            self._tell(Exited(status, log_tail(self._log_path)))
            return False
        return True

    def _obey(self, message: OwnerToKeeper) -> bool:
        if isinstance(message, Signal):
            if self._child is not None:
                self._child.send_signal(message.number)
            return True
        if isinstance(message, End):
            if self._child is None:
                return False
            self._tell(Exited(self._child.end(END_GRACE), log_tail(self._log_path)))
            return False
        try:
            self._child = self._start(message)
            self._line = self._child.line
        except Exception as error:
            logger.exception("the process cannot be started")
            self._tell(Failed(describe_exception(error)))
            return False
        threading.Thread(target=self._await_end, args=(self._child,), daemon=True).start()
        self._tell(Started(self._child.pid))
        return True

    def _start(self, message: RunCore | RunWorker) -> Child:
        # Ray sets as many as the actor has CPUs, which are for all workers of a core.
        os.environ["OMP_NUM_THREADS"] = str(message.threads)
        if isinstance(message, RunWorker):
            directory = self._tensor_dir / message.directory
            directory.mkdir(mode=0o700)
            self._board, self._rank = WorkerBoard.create(directory, message.num_workers, BOARD), message.rank
            return worker_child(message.spec)
        descriptor = os.open(self._run_dir / "engine.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(message.info))
        return core_child(str(self._run_dir), message.rank)

    def _await_end(self, child: Child) -> None:
        child.await_end()
        os.write(self._notice, b"\0")

    def _relay(self, line: Connection[Any, Any]) -> None:
        try:
            said = line.recv_bytes()
        except (EOFError, OSError):
            said = b""
            self._line = None
        self._tell(Line(said))

    def _report_measures(self) -> None:
        if self._board is None:
            return
        stats = self._board.read()[self._rank]
        if stats != self._measured:
            self._measured = stats
            self._tell(Measured(stats))

    def _tell(self, message: KeeperToOwner) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))


def run_keeper(fd: int, node: str, address: str, label: str) -> int:
    """Run a keeper in a process of its own, whose parent is not the caller; returns the process's exit status."""
    if os.fork():
        # Ray kills the children of its processes with them, before they can clean up.
        return 0
    configure_logging(f"keeper {label}")
    os.set_inheritable(fd, False)
    Keeper(Connection(fd), node, address, label).run()
    return 0


def _free_port(address: str) -> int:
    """A port of this machine that nobody listens on.

    Raises:
        NBEngineError: there is none.
    """
    for port in random.Random().sample(PORTS, 50):
        with (
            contextlib.suppress(OSError),
            socket.create_server(
                (address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET
            ),
        ):
            return port
    raise NBEngineError(f"{address} has no free port from {PORTS.start} to {PORTS.stop - 1}")


def _redirect_output(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
