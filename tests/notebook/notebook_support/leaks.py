"""What kernels and engines may leave behind: nothing but logs."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

from nbengine.client.directory import list_engines, stop_engine

SETTLE_SECONDS = 8.0
LASTING_FILES = ("nbengine-launch.lock",)


def engine_remains(directory: Path) -> list[str]:
    """Processes that use a directory for their engine, and the files of engines and sessions in it."""
    remains = [
        f"file {path}"
        for path in directory.rglob("*")
        if not path.is_dir()
        and "ipython" not in path.parts
        and path.suffix != ".log"
        and path.name not in LASTING_FILES
    ]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            uses = process.environ().get("XDG_RUNTIME_DIR") == str(directory)
            if uses and process.pid != os.getpid():
                remains.append(f"process {process.pid} {process.cmdline()}")
    return remains


def wait_until_clean(directory: Path) -> None:
    """Fail if something is still there after a while; then clean up, so that one test fails and not all."""
    end = time.monotonic() + SETTLE_SECONDS
    while remains := engine_remains(directory):
        if time.monotonic() > end:
            for engine in list_engines():
                stop_engine(engine.info)
            raise AssertionError("left behind: " + "; ".join(remains))
        time.sleep(0.02)
