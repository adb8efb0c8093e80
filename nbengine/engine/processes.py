"""Starting engine cores and workers, telling how they ended, and leaving none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

HOST_FD_VARIABLE = "NBENGINE_HOST_FD"
PARENT_FD_VARIABLE = "NBENGINE_PARENT_FD"

NOTEBOOK_VARIABLES = (
    "JPY_PARENT_PID",
    "JPY_SESSION_NAME",
    "MPLBACKEND",
    "FORCE_COLOR",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "PAGER",
    "GIT_PAGER",
)
"""What a Jupyter kernel sets for itself and an engine must not inherit."""


class RunningProcess(Protocol):
    """What there is to do with a process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Of the process, on its machine."""

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises `subprocess.TimeoutExpired` if it has not come within `timeout` seconds."""

    def terminate(self) -> None:
        """Send it SIGTERM."""

    def kill(self) -> None:
        """Send it SIGKILL."""


class CoreHandle(Protocol):
    """A running engine core, on this machine or another."""

    rank: int
    incarnation: int

    @property
    def pid(self) -> int:
        """Of its process, on its machine."""

    def poll(self) -> int | None:
        """Its exit status in the manner of `Popen.returncode`, None while it runs."""

    def describe_end(self) -> str:
        """How it ended, to complete "engine core 0 (pid 1) …"."""

    def log_tail(self) -> str:
        """The last lines of its log, when it has ended."""

    def send_signal(self, number: int) -> None:
        """Signal it; of no effect when it has ended."""

    def wait(self, timeout: float) -> None:
        """Return when it has ended; raises `TimeoutError` if it has not within `timeout` seconds."""

    def close(self) -> None:
        """Let go of it; a core that still runs ends."""


class CoreLauncher(Protocol):
    """Starts engine cores on machines of its choice."""

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        """Start one; returns before it has loaded anything.

        Raises:
            EngineStartError: there is no place for it.
        """

    def close(self) -> None:
        """Give back what was reserved; all cores have ended."""


@dataclass(slots=True)
class WorkerProcess:
    """A worker. `connection` is this process's end of a private line to it; each sees EOF when the other is gone."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]


SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "1000"
"""How often a thread of libgomp looks for work before it sleeps, instead of 300,000 times: spinning threads take
the cores from whoever else wants them, and on a busy machine a step takes many times as long."""


def child_environment() -> dict[str, str]:
    """Return this process's environment without what belongs to a notebook kernel or to this process alone.

    torch's threads spin for less time than by default, unless the user has chosen.
    """
    dropped = {*NOTEBOOK_VARIABLES, PARENT_FD_VARIABLE, HOST_FD_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if not any(name in environment for name in SPIN_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
    return environment


def start_worker(log: str | os.PathLike[str] | None, *, own_session: bool = False) -> WorkerProcess:
    """Start a worker in this process's session and group; what it is to do it reads from the line.

    With `own_session` it survives what ends this process's whole group, and sees the end of the line then. Its output
    is added to the file `log` (0600), or goes where this process's goes.
    """
    theirs, ours = socket.socketpair()
    with theirs, ours, contextlib.ExitStack() as stack:
        output = None
        if log is not None:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            stack.callback(os.close, output)
        process = subprocess.Popen(
            engine_command("worker", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(),
            pass_fds=(theirs.fileno(),),
            start_new_session=own_session,
        )
        return WorkerProcess(process, Connection(ours.detach()))


def engine_command(*arguments: str) -> list[str]:
    """Return the command line of one of the engine's processes."""
    safe_path = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *safe_path, "-m", "nbengine.engine", *arguments]


def end_processes(processes: Collection[RunningProcess], grace: float, term_grace: float) -> None:
    """Wait `grace` seconds for processes to end by themselves; then SIGTERM, and SIGKILL `term_grace` later.

    When this returns they are gone, and waited for.
    """
    if _all_end(processes, grace):
        return
    for process in processes:
        process.terminate()
    if not _all_end(processes, term_grace):
        for process in processes:
            process.kill()
    for process in processes:
        process.wait()


def _all_end(processes: Collection[RunningProcess], timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def describe_status(status: int, killers: str = "the kernel's out-of-memory killer ends processes so") -> str:
    """Return what a `Popen.returncode` says, as in "was killed by signal 9 (SIGKILL)".

    `killers` follows that signal: who may have sent it.
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    hint = f"; {killers}" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status} ({name}){hint}"
