"""Processes as others see them: `/proc`, `psutil`, `subprocess`, `signal`, and what `os` has of them."""

from __future__ import annotations

import errno
import math
import signal
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from tests.simulation import state
from tests.simulation.clocks import monotonic, wall_time
from tests.simulation.primitives import deadline_of
from tests.simulation.processes import End, Process

CLOCK_TICKS = 100
MOUNT = b"pos:\t0\nmnt_id:\t1\n"
_REST = "0 " * 13
"""Fields of /proc/PID/stat that nobody here reads."""


def read_proc(path: str) -> bytes | None:
    """Content of a file below /proc that is about a simulated process or the simulated clock."""
    if not path.startswith("/proc/"):
        return None
    _, _, whose, *name = path.split("/")
    if len(name) == 1 and name[0] in ("stat", "cmdline", "status", "schedstat"):
        process = state.process() if whose == "self" else find(int(whose))
        if process is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return proc_file(process, name[0])
    # All directories of a world are on one mount.
    return MOUNT if name[:1] == ["fdinfo"] else None


def proc_file(process: Process, name: str) -> bytes:
    """One of the files that tell of a process, as Linux writes it."""
    letter = "Z" if process.status is not None else "T" if process.is_stopped else "S"
    if name == "cmdline":
        return b"" if process.status is not None else "\0".join([*process.argv, ""]).encode()
    if name == "schedstat":
        # Nobody waits for a processor here.
        return b"0 0 1\n"
    if name == "status":
        return f"Name:\tpython\nState:\t{letter}\nPid:\t{process.pid}\n".encode()
    family = f"{process.parent_pid} {process.group} {process.session}"
    ticks = int(process.started * CLOCK_TICKS)
    return f"{process.pid} (python) {letter} {family} 0 -1 {_REST}{ticks} 0\n".encode()


def find(pid: int) -> Process | None:
    """The process that has a pid."""
    process = state.world().processes.get(pid)
    return process if process is not None and process.exists else None


def existing(pid: int) -> Process:
    """The process that has a pid; raises `ProcessLookupError`."""
    process = find(pid)
    if process is None:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    return process


def os_kill(pid: int, number: int) -> None:
    """`os.kill`."""
    state.process().outside("kill")
    existing(pid).kill(number)


def os_killpg(group: int, number: int) -> None:
    """`os.killpg`."""
    state.process().outside("killpg")
    members = [process for process in list(state.world().processes.values()) if process.group == group]
    if not any(process.exists for process in members):
        raise ProcessLookupError(errno.ESRCH, "No such process")
    for process in members:
        process.kill(number)


def os_getsid(pid: int) -> int:
    """`os.getsid`."""
    return (existing(pid) if pid else state.process()).session


def os_waitid(kind: int, number: int, options: int) -> object | None:
    """`os.waitid`, as it is used: to look without taking."""
    process = existing(number)
    return None if process.status is None else process


def os_exit(status: int) -> None:
    """`os._exit`."""
    state.process().end(status)


class ProcessDescriptor(End):
    """A pidfd."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process

    def readable(self) -> bool:
        return self.process.status is not None

    def hung_up(self) -> bool:
        return False


def pidfd_open(pid: int, flags: int = 0) -> int:
    """`os.pidfd_open`."""
    process = state.process()
    process.outside("pidfd_open", opens=1)
    return process.open_number(ProcessDescriptor(existing(pid)))


class Environment(Mapping[str, str]):
    """`os.environ`."""

    def __getitem__(self, name: str) -> str:
        return state.process().environment[name]

    def __iter__(self) -> Iterator[str]:
        return iter(state.process().environment)

    def __len__(self) -> int:
        return len(state.process().environment)


class SimPopen:
    """`subprocess.Popen`."""

    def __init__(self, args: list[str], **options: Any) -> None:
        process = state.process()
        process.outside("Popen", opens=2)
        environment = options.get("env") or dict(process.environment)
        self.args = args
        self._process = process.world.start_process(
            process,
            args,
            dict(environment),
            new_session=bool(options.get("start_new_session")),
            new_group=options.get("process_group") is not None,
            pass_fds=tuple(options.get("pass_fds", ())),
        )
        self.pid = self._process.pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and self._process.status is not None:
            self.returncode = self._process.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.returncode = self._process.wait(deadline_of(timeout))
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            self._process.kill(number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class SimPsutilProcess:
    """`psutil.Process`. The start of a process is computed from the wall clock's idea of when the machine started."""

    def __init__(self, pid: int | None = None) -> None:
        process = state.process()
        self.pid = process.pid if pid is None else pid
        process.outside("psutil", opens=1)
        if self.pid < 0:
            raise ValueError(f"pid must be a positive integer (got {pid})")
        found = find(self.pid)
        if found is None:
            raise psutil.NoSuchProcess(self.pid)
        self._process = found
        self._created = boot_time() + int(found.started * CLOCK_TICKS) / CLOCK_TICKS

    def _look(self) -> Process:
        state.process().outside("psutil", opens=1)
        if not self._process.exists:
            raise psutil.NoSuchProcess(self.pid)
        return self._process

    def create_time(self) -> float:
        return self._created

    def status(self) -> str:
        process = self._look()
        if process.status is not None:
            return str(psutil.STATUS_ZOMBIE)
        return str(psutil.STATUS_STOPPED if process.is_stopped else psutil.STATUS_SLEEPING)

    def cmdline(self) -> list[str]:
        process = self._look()
        return [] if process.status is not None else list(process.argv)

    def ppid(self) -> int:
        return self._look().parent_pid

    def is_running(self) -> bool:
        return self._process.exists

    def send_signal(self, number: int) -> None:
        self._look().kill(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def boot_time() -> float:
    """`psutil.boot_time`: whole seconds, from /proc/stat, which moves with the wall clock."""
    return float(math.floor(wall_time() - monotonic()))


def psutil_pids() -> list[int]:
    """`psutil.pids`."""
    state.process().outside("pids", opens=1)
    return [pid for pid, process in sorted(state.world().processes.items()) if process.exists]


def signal_signal(number: int, handler: Any) -> Any:
    """`signal.signal`."""
    handlers = state.process().handlers
    before = handlers.get(number, signal.SIG_DFL)
    handlers[number] = handler
    return before


def pidfd_send_signal(number: int, signal_number: int, *_: Any) -> None:
    """`signal.pidfd_send_signal`."""
    process = state.process().descriptors[number].process
    if process.status is not None:
        raise ProcessLookupError(errno.ESRCH, "No such process")
    process.kill(signal_number)


def set_wakeup_fd(number: int, *, warn_on_full_buffer: bool = True) -> int:
    """`signal.set_wakeup_fd`."""
    process = state.process()
    before, process.wakeup_fd = process.wakeup_fd, number
    return before
