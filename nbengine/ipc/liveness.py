"""The identity of other processes, and whether they run, by what the kernel noted at their start.

A pid alone names the process that has it at the moment, and the time of day at which a process started
changes whenever somebody sets the clock. On Linux a process is told from a later one with its pid by the
clock ticks between boot and its start; elsewhere by what psutil makes of the kernel's record.

Looking at a process needs a file descriptor, of which none may be left. A failure to look is no death: then
it counts whether the pid is taken.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import platform
import select
import signal
import sys
import uuid
from typing import NamedTuple

import msgspec
import psutil

_LARGEST_PID = 2**31 - 1


class ProcessState(enum.Enum):
    """The state of a process, as far as others can rely on it."""

    RUNNING = "running"
    """The process runs, sleeps or waits for a device: it goes on by itself."""
    STOPPED = "stopped"
    """SIGSTOP, SIGTSTP or the like has stopped it, until somebody continues it."""
    TRACED = "traced"
    """A debugger holds it."""
    GONE = "gone"
    """It has ended; a zombie has, too."""


class ProcessIdentity(msgspec.Struct, frozen=True, array_like=True):
    """One process of this machine, and none that gets its pid later."""

    pid: int
    """The process's id; 0 or less: no process."""
    started: int
    """Clock ticks between boot and its start on Linux; 0: not known, so that the pid alone counts. It means
    something only where `machine_id` is the same."""


@functools.cache
def machine_id() -> str:
    """Return a text that is the same for two processes if and only if a `ProcessIdentity` is."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        # The process's pid namespace: a container has its own pids.
        spaces = [os.stat("/proc/self/ns/pid").st_ino]
    except OSError:
        return f"{platform.node()}:{uuid.getnode():x}"
    # Its time namespace, which old kernels do not have: boot may have another time there.
    with contextlib.suppress(FileNotFoundError):
        spaces.append(os.stat("/proc/self/ns/time").st_ino)
    return ":".join([boot, *map(str, spaces)])


@functools.cache
def lasting_machine_id() -> str:
    """Return a text that this machine keeps when it is started again, and that no other machine has; empty if it
    has none.

    Machines that were copied from one image may share the number of the system, but not the name.
    """
    try:
        with open("/etc/machine-id", encoding="ascii") as file:
            number = file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""
    # The number itself is to be kept from others, as machine-id(5) says.
    told = f"nbengine:{number}:{platform.node()}".encode()
    return hashlib.sha256(told).hexdigest()[:32] if number else ""


def was_started_again(machine: str, lasting: str) -> bool:
    """Return whether this is the machine that had `machine` and `lasting` as its ids, and has been started again
    since: no process of that time runs any more."""
    if not lasting or machine == machine_id() or lasting != lasting_machine_id():
        return False
    before, now = _boot_of(machine), _boot_of(machine_id())
    return None not in (before, now) and before != now


def _boot_of(machine: str) -> uuid.UUID | None:
    """Return the boot in a `machine_id`; None if it is not known."""
    try:
        return uuid.UUID(machine.partition(":")[0])
    except ValueError:
        return None


def identity_of(pid: int) -> ProcessIdentity | None:
    """Find the process that has a pid now; None if no process has it, or only a zombie."""
    if not 0 < pid <= _LARGEST_PID:
        return None
    seen = _look(pid)
    if seen is None:
        return ProcessIdentity(pid, 0) if _is_taken(pid) else None
    return None if seen.state is ProcessState.GONE else ProcessIdentity(pid, seen.started)


def this_process() -> ProcessIdentity:
    """Return the identity of this process."""
    pid = os.getpid()
    return identity_of(pid) or ProcessIdentity(pid, 0)


def state_of(process: ProcessIdentity) -> ProcessState:
    """Return the state of a process; a later process with its pid does not count."""
    if not 0 < process.pid <= _LARGEST_PID:
        # A peer may have sent any number as its pid.
        return ProcessState.GONE
    seen = _look(process.pid)
    if seen is None:
        return ProcessState.RUNNING if _is_taken(process.pid) else ProcessState.GONE
    is_another = process.started not in (0, seen.started)
    return ProcessState.GONE if is_another else seen.state


def is_alive(process: ProcessIdentity) -> bool:
    """Return whether a process runs or is stopped, which is to say has not ended."""
    return state_of(process) is not ProcessState.GONE


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Send a signal to exactly this process; return False if it is gone.

    Raises:
        PermissionError: the process is another user's.
    """
    descriptor = _open(process.pid)
    try:
        # Checked after the descriptor is open: it stands for the process that has the pid now.
        if not is_alive(process):
            return False
        if descriptor is None:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        if descriptor is not None:
            os.close(descriptor)
    return True


class ProcessWatch:
    """A watch on one process; a later process with its pid does not count.

    Where the kernel gives out descriptors of processes (`pidfd_open(2)`), asking costs a microsecond.
    """

    def __init__(self, process: ProcessIdentity) -> None:
        self.process = process
        self._descriptor: int | None = None
        self._is_own = process.pid == os.getpid()
        self._gone = process.pid <= 0
        if self._is_own or self._gone:
            return
        self._descriptor = _open(process.pid)
        # Checked after the descriptor is open: it stands for the process that has the pid now.
        self._gone = not is_alive(process)

    @property
    def pid(self) -> int:
        """Return the process's id."""
        return self.process.pid

    def gone(self) -> bool:
        """Return whether the process has ended; a zombie has."""
        if self._gone or self._is_own:
            return self._gone
        self._gone = (
            _is_readable(self._descriptor) if self._descriptor is not None else not is_alive(self.process)
        )
        return self._gone

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, never to a later one with its pid;
        this has no effect when it has ended."""
        if self._descriptor is None:
            send_signal(self.process, number)
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)

    def close(self) -> None:
        """Give the descriptor back; another call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _is_readable(descriptor: int) -> bool:
    # A `poll` object is for one thread at a time, and several may ask.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


class _Seen(NamedTuple):
    """The kernel's record of the process that has a pid now."""

    state: ProcessState
    started: int


_LINUX_STATES = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.TRACED,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
    "x": ProcessState.GONE,
}
_OTHER_STATES = {
    psutil.STATUS_STOPPED: ProcessState.STOPPED,
    psutil.STATUS_TRACING_STOP: ProcessState.TRACED,
    psutil.STATUS_ZOMBIE: ProcessState.GONE,
    psutil.STATUS_DEAD: ProcessState.GONE,
}
_STATE, _STARTED = 0, 19
"""Places of fields 3 and 22 of /proc/PID/stat among the fields behind the command."""


def _look(pid: int) -> _Seen | None:
    """Look at the process that has a pid; return None if that fails, as when no process has it."""
    if sys.platform != "linux":
        return _look_elsewhere(pid)
    if not _proc_is_ours():
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
    except OSError:
        return None
    # The command stands in parentheses and may hold anything, further ones included.
    fields = content[content.rindex(b")") + 1 :].decode("ascii").split()
    return _Seen(_LINUX_STATES.get(fields[_STATE], ProcessState.RUNNING), int(fields[_STARTED]))


def _look_elsewhere(pid: int) -> _Seen | None:
    try:
        process = psutil.Process(pid)
        # Its hash is of the pid and of what the kernel recorded: where `create_time` follows the clock, this
        # does not.
        return _Seen(_OTHER_STATES.get(process.status(), ProcessState.RUNNING), hash(process))
    except (psutil.Error, OSError):
        return None


@functools.cache
def _proc_is_ours() -> bool:
    """Return whether /proc exists and shows the pids of this process's namespace,
    not those of a container's host."""
    try:
        return int(os.readlink("/proc/self")) == os.getpid()
    except (OSError, ValueError):
        return False


def _is_taken(pid: int) -> bool:
    """Return whether some process has a pid; this needs no file descriptor."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _open(pid: int) -> int | None:
    if pid > 0 and hasattr(os, "pidfd_open"):
        # Old kernels and some sandboxes refuse it.
        with contextlib.suppress(OSError, OverflowError):
            return os.pidfd_open(pid)
    return None
