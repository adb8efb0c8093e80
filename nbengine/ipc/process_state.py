"""A look at whether a process is held: stopped by a signal, or by a debugger."""

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
