"""A look at what keeps a process from running: a signal that stopped it, a debugger, or others at the processors."""

from __future__ import annotations

import sys

from nbengine.ipc.liveness import ProcessIdentity, ProcessState, state_of


def what_holds(pid: int) -> ProcessState:
    """Return the state of a process of this machine, like `state_of`.

    A process with a debugger is TRACED even while the debugger lets it run, because it may be held again in a
    moment.
    """
    if sys.platform == "linux" and _has_tracer(pid):
        return ProcessState.TRACED
    return state_of(ProcessIdentity(pid, 0))


def _has_tracer(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"TracerPid:"):
                    return line.split()[1] != b"0"
    except OSError:
        # The process is gone, or no descriptor is left to look with.
        return False
    return False


def seconds_in_line(pid: int) -> float | None:
    """Return for how many seconds the main thread of a process of this machine was ready to run, while other threads
    had the processors; None where the system does not count them (Linux does, in schedstat)."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            _, waited, turns = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    # Every process has had a turn: a system that does not count writes zeros.
    return waited / 1e9 if turns else None
