"""Kernels and engines may leave nothing behind but logs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from nbengine.client.engines.directory import list_engines, stop_engine

SETTLE_SECONDS = 30.0
LASTING_FILES = ("nbengine-launch.lock",)
SHM = Path("/dev/shm")


def shared_memory(directory: Path) -> list[str]:
    """List the tensor directories of engines with run directories in `directory`; others may run on this
    machine."""
    if not SHM.is_dir():
        return []
    return [str(path) for path in SHM.iterdir() if path.name.startswith(f"nbengine-{directory.name}-")]


def engine_remains(directory: Path) -> list[str]:
    """Processes of engines whose log lies in a directory, their files in it, and their shared memory."""
    remains = [f"shared memory {path}" for path in shared_memory(directory)]
    remains += [
        f"file {path}"
        for path in directory.rglob("*")
        if not path.is_dir()
        and "ipython" not in path.parts
        and path.suffix != ".log"
        and path.name not in LASTING_FILES
    ]
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/2").startswith(f"{directory}/"):
                remains.append(f"process {pid}, which writes to an engine's log")
    return remains


def remains_now(directory: Path) -> list[str]:
    """Do what `engine_remains` does; a directory may go while it is read."""
    while True:
        with contextlib.suppress(FileNotFoundError):
            return engine_remains(directory)


def end_engines() -> None:
    """End every engine that has a connection file."""
    for engine in list_engines():
        stop_engine(engine.info)


def wait_until_clean(directory: Path) -> None:
    """Fail if something is still there after a while; then clean up, so that one test fails and not all."""
    end = time.monotonic() + SETTLE_SECONDS
    while remains := remains_now(directory):
        if time.monotonic() > end:
            end_engines()
            raise AssertionError("left behind: " + "; ".join(remains))
        time.sleep(0.02)
