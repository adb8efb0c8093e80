"""The processes of engine cores and workers: how they are started, how they ended, and how all are ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from nbengine.ipc.liveness import ProcessState

logger = logging.getLogger(__name__)

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
"""Variables that a Jupyter kernel sets for itself and an engine must not inherit."""


class RunningProcess(Protocol):
    """The part of `subprocess.Popen` that is used of a process."""

    @property
    def pid(self) -> int:
        """Return the process's id on its machine."""

    def poll(self) -> int | None:
        """Return the process's exit status, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process's end.

        Raises:
            subprocess.TimeoutExpired: it has not come within `timeout` seconds.
        """

    def terminate(self) -> None:
        """Send SIGTERM to the process."""

    def kill(self) -> None:
        """Send SIGKILL to the process."""


class CoreHandle(Protocol):
    """A running engine core, on this machine or another."""

    rank: int
    incarnation: int
    secret: bytes
    """The secret that lets the host recognise the core: `engine_identity`."""

    @property
    def pid(self) -> int:
        """Return the id of the core's process on its machine."""

    @property
    def group(self) -> int | None:
        """Return the process group that the core leads on this machine; None: it runs on another one."""

    def state(self) -> ProcessState:
        """Return what keeps the core's process from running; RUNS where that cannot be told."""

    def poll(self) -> int | None:
        """Return the core's exit status in the manner of `Popen.returncode`, None while it runs."""

    def describe_end(self) -> str:
        """Say how the core ended, to complete "engine core 0 (pid 1) …"."""

    def log_tail(self) -> str:
        """Return the last lines of the core's log, when it has ended."""

    def send_signal(self, number: int) -> None:
        """Send a signal to the core; this has no effect when it has ended."""

    def wait(self, timeout: float) -> None:
        """Wait until the core has ended; raises `TimeoutError` if it does not within `timeout` seconds."""

    def close(self) -> None:
        """Let go of the core; one that still runs ends."""


class CoreLauncher(Protocol):
    """A launcher starts engine cores on machines of its choice."""

    def start(self, rank: int, incarnation: int) -> CoreHandle:
        """Start an engine core; return before it has loaded anything.

        Raises:
            EngineStartError: no machine has room for it.
        """

    def close(self) -> None:
        """Give back what was reserved; called when all cores have ended."""


@dataclass(slots=True)
class WorkerProcess:
    """The process of a worker. `connection` is this end of a private line to it;
    each end sees EOF when the other is gone."""

    process: subprocess.Popen[bytes]
    connection: Connection[Any, Any]


END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that a host takes as a wish that its engine end."""


@contextlib.contextmanager
def end_signals_held() -> Iterator[None]:
    """Let a process that is started within the block begin with `END_SIGNALS` held back, until it takes them.

    Otherwise they would kill it while its interpreter imports, and the engine's files and cores would be left
    behind.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_end_signals() -> None:
    """Let the signals come that were held back; called when their handlers are set."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


SPIN_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
SPIN_COUNT = "1000"
"""Times that a thread of libgomp looks for work before it sleeps, instead of 300,000: spinning threads take
the CPUs from other processes, and on a busy machine a step takes many times as long."""


def child_environment() -> dict[str, str]:
    """Return this process's environment without what belongs to a notebook kernel or to this process alone.

    torch's threads spin for less time than by default, unless the user has chosen.
    """
    dropped = {*NOTEBOOK_VARIABLES, PARENT_FD_VARIABLE, HOST_FD_VARIABLE}
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if not any(name in environment for name in SPIN_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPIN_COUNT
    return environment


def start_worker(
    log: str | os.PathLike[str] | None,
    *,
    own_session: bool = False,
    inherited: Sequence[int] = (),
) -> WorkerProcess:
    """Start a worker in this process's session and group; it reads its task from the line.

    With `own_session` it survives a signal that ends this process's whole group, and then sees the end of the
    line. Its output is added to the file `log` (0600); without `log`, or if the file cannot be opened, it
    goes where this process's output goes. It gets the `inherited` descriptors, too.
    """
    theirs, ours = socket.socketpair()
    with theirs, ours, contextlib.ExitStack() as stack:
        output = opened_log(log, stack)
        process = subprocess.Popen(
            engine_command("worker", str(theirs.fileno())),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=child_environment(),
            pass_fds=(theirs.fileno(), *inherited),
            start_new_session=own_session,
        )
        return WorkerProcess(process, Connection(ours.detach()))


def opened_log(log: str | os.PathLike[str] | None, stack: contextlib.ExitStack) -> int | None:
    """Open a worker's log until the end of `stack`; None if it has none, or the file cannot be opened."""
    if log is None:
        return None
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        logger.warning("a worker writes into another's log, because it cannot have its own: %s", error)
        return None
    stack.callback(os.close, output)
    return output


def engine_command(*arguments: str) -> list[str]:
    """Return the command line of one of the engine's processes."""
    safe_path = ["-P"] if sys.flags.safe_path else []
    return [sys.executable, *safe_path, "-m", "nbengine.engine", *arguments]


def end_processes(processes: Collection[RunningProcess], grace: float, term_grace: float) -> None:
    """Wait `grace` seconds for processes to end by themselves;
    then send SIGTERM, and SIGKILL `term_grace` seconds later.

    When this returns, they have all ended and been waited for.
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


_BUS_ERROR = (
    "a file that it had mapped, such as the model's weights, was cut short or could not be read, or shared memory "
    "(/dev/shm) ran out"
)


def describe_status(status: int, killers: str = "the kernel's out-of-memory killer ends processes so") -> str:
    """Put a `Popen.returncode` into words, as in "was killed by signal 9 (SIGKILL)".

    `killers` follows SIGKILL and says who may have sent it.
    """
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    hints: dict[int, str] = {signal.SIGKILL: killers, signal.SIGBUS: _BUS_ERROR}
    hint = f"; {hints[-status]}" if -status in hints else ""
    return f"was killed by signal {-status} ({name}){hint}"
