"""The keeper: parent of one process of an engine on a node of a cluster.

It does for the process what a host does for an engine core on its machine, and what an engine core does for
its workers: it gives it directories, watches it, says how it ended, ends it when its owner does not need it
any more, and removes its files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import sys
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import msgspec

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
from nbengine.errors import NBEngineError
from nbengine.ipc.liveness import ProcessIdentity, ProcessWatch, identity_of
from nbengine.ipc.process_state import what_holds
from nbengine.runtime.connection import write_engine_file
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.logs import configure_logging, describe_exception, log_tail
from nbengine.runtime.worker_board import WorkerBoard

logger = logging.getLogger(__name__)

END_GRACE = 2.0
"""Seconds that a process gets to end once its owner is gone or lets go of it;
then its process group is killed."""


LOOK_SECONDS = 1.0
"""Seconds between two looks at whether the owner still runs."""
MEASURE_SECONDS = 0.5
"""Seconds between two looks at what a worker has measured."""
PORTS = range(20000, 32768)
"""Ports among which a free one is looked for: the kernel gives other ports to processes that ask for any."""


class Keeper:
    """The keeper of one process for the owner at the other end of `connection`."""

    def __init__(
        self,
        connection: Connection[Any, Any],
        node: str,
        address: str,
        label: str,
        owner: ProcessWatch | None = None,
    ) -> None:
        self._connection = connection
        self._owner = owner
        self._log_path = new_node_log(label)
        _redirect_output(self._log_path)
        port = _free_port(address)
        self._directories = EngineDirectories.make()
        self._placed = Placed(
            node=node,
            hostname=socket.gethostname(),
            address=address,
            port=port,
            run_dir=self._directories.run_dir,
            tensor_dir=self._directories.tensor_dir,
            marker=self._directories.marker,
            log_path=str(self._log_path),
        )
        self._decoder: msgspec.msgpack.Decoder[OwnerToKeeper] = msgspec.msgpack.Decoder(OwnerToKeeper)
        self._child: Child | None = None
        self._line: Connection[Any, Any] | None = None
        self._has_ended, self._notice = os.pipe()
        self._board: WorkerBoard | None = None
        self._rank = 0
        self._measured: Measured | None = None

    def run(self) -> None:
        """Keep the process until it has ended, or the owner is gone."""
        try:
            self._tell(self._placed)
            while self._turn():
                pass
        except (EOFError, OSError):
            logger.info("the owner of this process is gone, or does not need it any more")
        finally:
            if self._child is not None:
                self._child.end(END_GRACE)
            self._directories.remove()

    def _turn(self) -> bool:
        """Handle the next events; return whether more is to be done."""
        line = self._line
        sources = [source for source in (self._connection, self._has_ended, line) if source is not None]
        ready = wait(sources, LOOK_SECONDS if self._board is None else MEASURE_SECONDS)
        if not ready and self._owner is not None and self._owner.gone():
            # The line has not ended because a process that the owner forked holds its end.
            raise EOFError
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
        # Ray sets the number of the actor's CPUs, but those are for all workers of an engine core.
        os.environ["OMP_NUM_THREADS"] = str(message.threads)
        if isinstance(message, RunWorker):
            directory = Path(self._directories.tensor_dir, message.directory)
            directory.mkdir(mode=0o700)
            self._board, self._rank = WorkerBoard.create(directory, message.num_workers, BOARD), message.rank
            return worker_child(message.spec)
        own = self._directories
        info = msgspec.structs.replace(
            message.info, run_dir=own.run_dir, tensor_dir=own.tensor_dir, marker=own.marker
        )
        write_engine_file(info)
        return core_child(own.run_dir, message.rank, message.secret)

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
        measured = Measured(self._board.read()[self._rank], self._board.pulses()[self._rank])
        if self._child is not None:
            measured.pulse.state = what_holds(self._child.pid)
        if measured != self._measured:
            self._measured = measured
            self._tell(measured)

    def _tell(self, message: KeeperToOwner) -> None:
        self._connection.send_bytes(msgspec.msgpack.encode(message))


def run_keeper(fd: int, node: str, address: str, label: str) -> int:
    """Run a keeper in its own process, which is no child of the caller's;
    return this process's exit status."""
    # This parent is the actor's process, which waits until this process has ended.
    watch = ProcessWatch(identity_of(os.getppid()) or ProcessIdentity(0, 0))
    if os.fork():
        # Ray kills the children of its processes with them, before they can clean up.
        return 0
    # `reap` takes processes whose session has no leader for orphans, and the leader was the process that ends
    # now.
    os.setsid()
    configure_logging(f"keeper {label}")
    os.set_inheritable(fd, False)
    Keeper(Connection(fd), node, address, label, watch).run()
    return 0


def _free_port(address: str) -> int:
    """Find a port of this machine on which no process listens.

    Raises:
        NBEngineError: all ports that were tried are taken.
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
