"""A worker on another machine, which an executor uses like one on its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
from multiprocessing.connection import Connection
from typing import Any

from nbengine.cluster.messages import Line, Measured, Placed
from nbengine.cluster.remote import LOST, News, RemoteProcess
from nbengine.ipc.control_messages import WorkerPulse
from nbengine.metrics.stats import WorkerStats

KILL_SECONDS = 10.0
"""Seconds to wait for the end of a process that was killed, and whose machine may be gone."""


class RemoteWorker:
    """A `RunningProcess` with an end of a private line, on which the executor only listens."""

    def __init__(self) -> None:
        theirs, ours = socket.socketpair()
        self.connection: Connection[Any, Any] = Connection(theirs.detach())
        self._line: Connection[Any, Any] = Connection(ours.detach())
        self._settled = threading.Event()
        self.process: RemoteProcess | None = None
        self.stats: WorkerStats | None = None
        self.pulse: WorkerPulse | None = None
        """The counts that the worker sent last; None before the first."""

    def note(self, process: RemoteProcess, message: News) -> None:
        """Take in news of the worker; called on the thread of the cluster."""
        self.process = process
        if isinstance(message, Measured):
            self.stats, self.pulse = message.stats, message.pulse
        # The executor may have closed its end.
        with contextlib.suppress(OSError):
            if isinstance(message, Line) and message.message:
                self._line.send_bytes(message.message)
            elif isinstance(message, Line) or process.has_ended:
                self._line.close()
        if isinstance(message, Placed) or process.has_ended:
            self._settled.set()

    def place(self) -> Placed | None:
        """Wait until it is known where the worker is to run, and return its place; None if it has none."""
        self._settled.wait()
        return None if self.process is None else self.process.placed

    @property
    def pid(self) -> int:
        return 0 if self.process is None else self.process.pid

    @property
    def end(self) -> str:
        """Say how the worker ended; empty if it was never placed."""
        return "" if self.process is None else self.process.end

    def log_tail(self, patience: float) -> str:
        """Return the last lines of the worker's log, if it ends within `patience` seconds."""
        if self.process is None or not self.process.wait(patience):
            return ""
        return self.process.log_tail

    def poll(self) -> int | None:
        return None if self.process is None else self.process.status

    def wait(self, timeout: float | None = None) -> int:
        """Wait like `RunningProcess.wait`; without a timeout, give up after `KILL_SECONDS`."""
        if self.process is None or not self.process.wait(KILL_SECONDS if timeout is None else timeout):
            if timeout is None:
                return LOST
            raise subprocess.TimeoutExpired("worker", timeout)
        status = self.process.status
        return LOST if status is None else status

    def terminate(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
