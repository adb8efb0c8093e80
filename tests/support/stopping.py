"""Processes that a test holds still."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from nbengine.client.engines.processes import wait_until

PATIENCE = 60.0
"""Seconds that a process may take to stop."""


def stop(*pids: int) -> None:
    """Stop processes with SIGSTOP, and return when none of their threads runs any more.

    On a busy machine the others of a process go on until the one that takes the signal gets a processor.
    """
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        assert wait_until(lambda pid=pid: _states(pid) <= {"T", "Z"}, PATIENCE), f"process {pid} goes on"


def _states(pid: int) -> set[str]:
    """The states of a process's threads, as /proc spells them; one that ends meanwhile has none."""
    states = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                states.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return states
