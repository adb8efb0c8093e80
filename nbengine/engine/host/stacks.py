"""The stacks of processes that stand, whatever they are stuck in, read from their logs."""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbengine.engine.host.events import StacksGathered
from nbengine.runtime.logs import worker_log_path
from nbengine.runtime.processes import CoreHandle
from nbengine.runtime.stack_dumps import STACKS_SIGNAL

STACKS_SECONDS = 3.0
"""Seconds that the processes have to write; the handler is in C and waits for nothing, but a process may get
no processor."""
MAX_FRAMES = 12
"""Most frames of each process's main thread that the error shows; the log has all frames of all threads."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*:$")
_FRAME = re.compile(r"^  File \".*\", line .* in .*$")


@dataclass(frozen=True, slots=True)
class _Asked:
    core: CoreHandle
    due: float
    logs: dict[str, tuple[Path, int]]
    """By the name of the process that writes there: the file, and its length before."""


class StackRequests:
    """The requests for the stacks of engine cores and their workers.

    `log_path` is the path of the engine's log, `world_size` the number of workers of a core.
    """

    def __init__(self, log_path: str, world_size: int) -> None:
        self._log_path = log_path
        self._world_size = world_size
        self._asked: list[_Asked] = []

    @property
    def deadline(self) -> float:
        """Return the time at which `take` has something to give, infinity if never."""
        return min([asked.due for asked in self._asked]) if self._asked else math.inf

    def ask(self, core: CoreHandle, now: float) -> None:
        """Have a core's processes write their stacks; logs on another machine cannot be read here."""
        logs: dict[str, tuple[Path, int]] = {}
        if core.group is None:
            core.send_signal(STACKS_SIGNAL)
        else:
            named = {f"engine core {core.rank}": Path(self._log_path)}
            for worker in range(self._world_size):
                path = worker_log_path(self._log_path, core.rank * self._world_size + worker)
                named[f"worker {worker}"] = path
            logs = {name: (path, path.stat().st_size) for name, path in named.items() if path.exists()}
            for pid in _members(core.group):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, STACKS_SIGNAL)
        self._asked.append(_Asked(core, now + STACKS_SECONDS, logs))

    def take(self, now: float) -> list[StacksGathered]:
        """Return the stacks of the cores whose time to write is up."""
        if not self._asked:
            return []
        due = [asked for asked in self._asked if asked.due <= now]
        self._asked = [asked for asked in self._asked if asked.due > now]
        return [StacksGathered(a.core.rank, a.core.incarnation, _read(a.logs)) for a in due]


def main_thread_of(text: str) -> list[str]:
    """Return the innermost frames of the main thread of the last process that wrote its stacks into a log."""
    frames: list[str] = []
    for line in text.splitlines():
        # The main thread is the oldest one, and the last that is written.
        if _THREAD.match(line):
            frames = []
        elif _FRAME.match(line):
            frames.append(line)
    return frames[:MAX_FRAMES]


def _read(logs: dict[str, tuple[Path, int]]) -> str:
    lines = []
    for name, (path, start) in logs.items():
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(start)
            frames = main_thread_of(file.read().decode(errors="replace"))
            lines += [f"{name} is in (innermost call first):", *frames] if frames else []
    return "\n".join(lines)


def _members(group: int) -> list[int]:
    """List the processes of a group that handle `STACKS_SIGNAL`; others would be ended by it."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group and _catches(pid):
                found.append(pid)
    return found


def _catches(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        # This is not Linux, or the process is gone.
        return os.path.exists("/proc/self/status") is False
    mask = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return mask is not None and bool(int(mask[1], 16) >> (STACKS_SIGNAL - 1) & 1)
