"""A process that a keeper has started, with the processes that it may have started itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nbengine.runtime.processes import (
    HOST_FD_VARIABLE,
    child_environment,
    engine_command,
    start_worker,
)


class Child:
    """The leader of its own process group, which sees the end of this process as the end of a pipe or line.

    `let_go` closes this process's end.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        let_go: Callable[[], None],
        line: Connection[Any, Any] | None = None,
    ) -> None:
        self._process = process
        self._let_go = let_go
        self.line = line
        """The line on which the process sends messages; None if it has none."""

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self._process.pid

    def send_signal(self, number: int) -> None:
        """Send a signal to the process; this has no effect when it has ended."""
        self._process.send_signal(number)

    def await_end(self) -> None:
        """Wait until the process has ended; a call of `end` must follow."""
        if hasattr(os, "waitid"):
            # The status is left: until it is taken, no other process or group can have this number.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()

    def end(self, grace: float) -> int:
        """Close this end of its pipe or line, give it `grace` seconds, kill its group,
        and return its exit status."""
        self._let_go()
        if grace:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()


def core_child(run_dir: str, rank: int, secret: bytes) -> Child:
    """Start an engine core that reads its configuration in `run_dir`,
    and is known to its host by `secret`."""
    theirs, ours = os.pipe()
    os.write(ours, secret)
    try:
        process = subprocess.Popen(
            engine_command("core", run_dir, str(rank)),
            stdin=subprocess.DEVNULL,
            env=child_environment() | {HOST_FD_VARIABLE: str(theirs)},
            pass_fds=(theirs,),
            process_group=0,
        )
    finally:
        os.close(theirs)
    return Child(process, os.fdopen(ours, "wb").close)


def worker_child(spec: bytes) -> Child:
    """Start a worker, and give it its pickled `WorkerSpec`."""
    worker = start_worker(None, own_session=True)
    # The end of one that has ended already will be noticed soon.
    with contextlib.suppress(OSError):
        worker.connection.send_bytes(spec)
    return Child(worker.process, worker.connection.close, worker.connection)
