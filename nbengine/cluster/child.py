"""A process that a keeper has started, with what it may have started itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from multiprocessing.connection import Connection
from typing import Any

from nbengine.engine.processes import start_core, start_worker


class Child:
    """The leader of a process group of its own, that sees the end of this process as the end of a pipe or line."""

    def __init__(
        self, process: subprocess.Popen[bytes], lifeline: int | None, line: Connection[Any, Any] | None
    ) -> None:
        self._process = process
        self._lifeline = lifeline
        self.line = line
        """What the process says; None if it has no line, or the line has ended."""

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Signal it; of no effect when it has ended."""
        self._process.send_signal(number)

    def await_end(self) -> None:
        """Return when it has ended. `end` has to follow."""
        if hasattr(os, "waitid"):
            # Until its status is taken, no other process or group can have its number.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()

    def end(self, grace: float) -> int:
        """Have it see the end of this process, give it `grace` seconds, kill what is left; returns its status."""
        self.close_line()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if grace:
                self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def close_line(self) -> None:
        """Let go of the line."""
        if self.line is not None:
            self.line.close()
            self.line = None


def core_child(run_dir: str, rank: int, incarnation: int) -> Child:
    """Start an engine core that reads its configuration in `run_dir`."""
    del incarnation
    core = start_core(run_dir, rank)
    return Child(core.process, core.lifeline, None)


def worker_child(spec: bytes) -> Child:
    """Start a worker, and give it its pickled `WorkerSpec`."""
    worker = start_worker(None, own_session=True)
    worker.connection.send_bytes(spec)
    return Child(worker.process, None, worker.connection)
