"""A test may leave nothing behind: there is a snapshot before it, and a comparison after it."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import psutil
import zmq
from process_support.looks import looks
from zmq.utils import garbage

SHM = Path("/dev/shm")
SETTLE_SECONDS = 30.0
LASTING_THREADS = ("nbengine-loop", "nbengine-background", "asyncio_")
"""Names of threads that serve the whole process and stay by design."""
LASTING_FILES = ("nbengine-launch.lock",)

Things = dict[object, str]
"""Identity and description of what there is."""


_num_modules_aside = 0


def set_modules_aside() -> None:
    """Keep what imported modules consist of out of garbage collections and of `gc.get_objects()`: it stays anyway, and
    going through it takes a twentieth of a second, several times a test."""
    global _num_modules_aside
    if len(sys.modules) != _num_modules_aside:
        _num_modules_aside = len(sys.modules)
        gc.collect()
        gc.freeze()


def take_snapshot(directories: Iterable[Path]) -> Things:
    """Threads, child processes, engines, shared memory, ZMQ contexts, sockets and files that there are now."""
    directories = list(directories)
    things: Things = {}
    for thread in threading.enumerate():
        if not _lasting(thread):
            things["thread", id(thread)] = f"thread {thread.name}"
    for child in psutil.Process().children(recursive=True):
        things["process", child.pid] = f"process {child}"
    for pid in _engine_processes(directories):
        things["process", pid] = f"process {pid}, which writes to an engine's log"
    for name in _shared_memory(directories):
        things["segment", name] = f"shared memory {name}"
    for item in _open_zmq_objects():
        things["zmq", id(item)] = f"open {item!r}"
    for directory in directories:
        # Unlike `rglob`, it passes over a folder that is removed while it looks.
        for folder, _, names in os.walk(directory):
            for path in (Path(folder, name) for name in names):
                if path.suffix != ".log" and path.name not in LASTING_FILES:
                    things["file", str(path)] = f"file {path}"
    return things


def leftovers(before: Things, directories: Iterable[Path]) -> list[str]:
    """Descriptions of what has appeared since `before` and does not go away."""
    directories = list(directories)
    for passed in looks(0.02):
        now = take_snapshot(directories)
        found = [description for key, description in now.items() if key not in before]
        if not found or passed > SETTLE_SECONDS:
            break
        gc.collect()
    return found


def _shared_memory(directories: list[Path]) -> list[str]:
    """List the tensor directories of engines with run directories in `directories`; others may run here,
    too."""
    if not SHM.is_dir():
        return []
    prefixes = tuple(f"nbengine-{directory.name}-" for directory in directories)
    return [path.name for path in SHM.iterdir() if path.name.startswith(prefixes)]


def _open_zmq_objects() -> list[zmq.Context | zmq.Socket]:
    own = garbage.gc._context
    return [
        item
        for item in gc.get_objects()
        if issubclass(type(item), (zmq.Context, zmq.Socket))
        and not item.closed
        and item is not own
        and getattr(item, "context", item) is not own
    ]


def _lasting(thread: threading.Thread) -> bool:
    return isinstance(thread, garbage.GarbageCollectorThread) or thread.name.startswith(LASTING_THREADS)


def _engine_processes(directories: list[Path]) -> list[int]:
    """Processes of any session whose stderr is a file of the directories."""
    found = []
    for pid in psutil.pids():
        try:
            path = os.readlink(f"/proc/{pid}/fd/2")
        except OSError:
            continue
        if pid != os.getpid() and any(path.startswith(f"{directory}/") for directory in directories):
            found.append(pid)
    return found
