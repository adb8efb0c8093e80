"""Locks on files, which nobody waits for without end, and the processes that hold them."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A process that has a lock."""

    pid: int
    command: str
    """The process's command line, shortened."""
    is_stopped: bool
    """Somebody has stopped it (SIGSTOP, Ctrl-Z, a debugger),
    so that it keeps the lock until it is continued."""

    def __str__(self) -> str:
        state = ", which is stopped" if self.is_stopped else ""
        return f"process {self.pid} ({self.command}){state}"


def take_lock(descriptor: int, timeout: float) -> bool:
    """Take an exclusive lock on an open file, until it is closed;
    return False if that fails for `timeout` seconds.

    It returns True as well where the system has no such locks (Windows, some network file systems).
    """
    if sys.platform == "win32":
        return True
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(_POLL_SECONDS, left))
        except OSError:
            return True
        else:
            return True


def release_lock(descriptor: int) -> None:
    """Let go of a lock before its file is closed, since a forked process may have the file open, too."""
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def holder_of(descriptor: int) -> LockHolder | None:
    """Find the process that has the lock on an open file;
    None: no process has it, or the system does not say."""
    file = os.fstat(descriptor)
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # "1: FLOCK ADVISORY WRITE 4711 fe:00:1234 0 EOF" (spaces vary); a "->" marks a process that
            # waits.
            fields = line.split()
            # Some file systems give another device here than in `fstat`, so only the number of the file is
            # compared.
            if (
                fields[1] == "FLOCK"
                and fields[5].rpartition(":")[2] == str(file.st_ino)
                and int(fields[4]) > 0
            ):
                return _described(int(fields[4]))
    return None


def _described(pid: int) -> LockHolder:
    command, state = "ended; a process that it has started has the lock", ""
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        command = " ".join(arguments.split())[:80] or "without a name"
        state = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="ascii", errors="replace")
            .rpartition(")")[2]
            .split()[0]
        )
    return LockHolder(pid, command, state in ("T", "t"))


def remedy_for(holder: LockHolder | None) -> str:
    """Say which process has a lock and what a person can do about it, as a clause that follows "…: "."""
    if holder is None:
        return "the system does not say who has it; end the other starts of engines, or restart the machine"
    ways = [f"kill -CONT {holder.pid}"] if holder.is_stopped else []
    return f"{holder} has it; let it go on or end it ({' or '.join([*ways, f'kill {holder.pid}'])})"
