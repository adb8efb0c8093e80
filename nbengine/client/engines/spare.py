"""The spare engine of this process: a host and a core that have imported everything before an engine is started."""

from __future__ import annotations

import os
import subprocess
import threading
from dataclasses import dataclass

from nbengine.client.engines.command import host_command, host_environment
from nbengine.runtime.processes import PARENT_FD_VARIABLE, end_signals_held
from nbengine.runtime.spare import HostOrder, SpareProcess

SPARE_SECONDS = 600.0
"""Seconds after which a spare engine that nobody has needed ends: it takes 200 MB of memory."""


@dataclass(frozen=True, slots=True)
class SpareHost:
    """A spare host that this process has started in these surroundings."""

    process: SpareProcess
    surroundings: tuple[dict[str, str], str | None]

    def give(self, order: HostOrder) -> bool:
        """Make it the host of an engine; return False if it cannot become that, and has ended then.

        It cannot if the environment or the working directory has changed since it was started.
        """
        if _surroundings() == self.surroundings:
            return self.process.give(order)
        self.process.close()
        return False


_lock = threading.Lock()
_spare: SpareHost | None = None
_timer: threading.Timer | None = None


def keep_spare(seconds: float = SPARE_SECONDS) -> None:
    """Start a spare engine, if there is none, for the next start of an engine; after `seconds` it ends.

    It needs this process's environment and working directory as they are now; it ends with this process.

    Raises:
        OSError: there is no room for another process.
        RuntimeError: there is none for another thread.
    """
    global _spare, _timer
    with _lock:
        if _spare is not None and _spare.process.process.poll() is None:
            return
        _drop()
        timer = threading.Timer(seconds, drop_spare)
        timer.name, timer.daemon = "nbengine-spare", True
        timer.start()
        _timer = timer
        _spare = _start()


def take_spare() -> SpareHost | None:
    """Return the spare engine, which is the caller's then; None if there is none."""
    global _spare
    with _lock:
        taken, _spare = _spare, None
        _drop()
    return taken


def drop_spare() -> None:
    """End the spare engine, if there is one."""
    with _lock:
        _drop()


def _drop() -> None:
    global _spare, _timer
    if _timer is not None:
        _timer.cancel()
        _timer = None
    if _spare is not None:
        _spare.process.close()
        _spare = None


def _start() -> SpareHost:
    surroundings = _surroundings()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with end_signals_held():
        process = SpareProcess(
            host_command("spare-host"), surroundings[0], PARENT_FD_VARIABLE, start_new_session=True, **quiet
        )
    return SpareHost(process, surroundings)


def _surroundings() -> tuple[dict[str, str], str | None]:
    """Return the environment and the working directory of engines; None: the directory has been removed."""
    try:
        return host_environment(), os.getcwd()
    except OSError:
        return host_environment(), None


def _forget_after_fork() -> None:
    """Let go of the parent's spare engine after a fork: only the parent may use it."""
    global _lock, _spare, _timer
    _lock, _timer = threading.Lock(), None
    if _spare is not None:
        _spare.process.process.returncode = 0
        os.close(_spare.process.line)
        _spare = None


os.register_at_fork(after_in_child=_forget_after_fork)
