"""The model cache on disk: its place, whole-directory writes, and locks between processes."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from nbengine.errors import ModelLoadError, shown
from nbengine.ipc.private import reason_of
from nbengine.runtime.locks import holder_of, take_lock

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the directory of everything that nbengine keeps between runs.

    It is `NBENGINE_CACHE_DIR`, else `nbengine` under `XDG_CACHE_HOME`, else `~/.cache/nbengine`. It need not
    exist.

    Raises:
        ModelLoadError: no directory can have that name.
    """
    configured = os.environ.get("NBENGINE_CACHE_DIR")
    base = configured or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        path = Path(base).expanduser().absolute()
        path = path if configured else path / "nbengine"
        # This fails for a name that is too long, or that the files of a model and of an engine cannot carry.
        path.exists()
        str(path).encode()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelLoadError(_unusable(base, reason_of(error))) from error
    return path


def make_directory(path: Path) -> Path:
    """Create `path` and its parents where they are missing.

    Raises:
        ModelLoadError: the directory cannot be created or is not writable; the message says how to choose
            another.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise ModelLoadError(_unusable(path, reason_of(error))) from error
    if not writable:
        raise ModelLoadError(_unusable(path, "it is not writable"))
    return path


@contextlib.contextmanager
def staging_directory(parent: Path) -> Iterator[Path]:
    """Make a fresh directory inside `parent` (so that renames out of it are atomic), and remove it
    afterwards."""
    make_directory(parent)
    try:
        staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    except OSError as error:
        raise ModelLoadError(_unusable(parent, reason_of(error))) from error
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """Give a directory to fill that appears as `destination`, complete, when the block ends without an error.

    When another process has put `destination` there meanwhile, that one stays.

    Raises:
        ModelLoadError: the block or the move failed to write.
    """
    with staging_directory(destination.parent) as staging:
        content = staging / "content"
        try:
            content.mkdir()
            yield content
            content.rename(destination)
        except OSError as error:
            if not destination.is_dir():
                raise ModelLoadError(_unusable(destination.parent, str(error))) from error


@contextlib.contextmanager
def file_lock(
    path: Path, on_wait: Callable[[], None], *, patience: float = 1800.0, stopped_patience: float = 10.0
) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if missing); `on_wait` is called when another process has it.

    The lock only saves work: every file in the cache appears by an atomic rename, so that without locks
    (Windows, some network file systems) two processes fetch twice but never see half a file. So nobody waits
    for longer than `patience` seconds, and for longer than `stopped_patience` for a process that somebody has
    stopped.
    """
    make_directory(path.parent)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ModelLoadError(_unusable(path.parent, reason_of(error))) from error
    try:
        if not take_lock(descriptor, 0):
            on_wait()
            _wait_patiently(descriptor, path, patience, stopped_patience)
        yield
    finally:
        os.close(descriptor)


def _wait_patiently(descriptor: int, path: Path, patience: float, stopped_patience: float) -> None:
    deadline = time.monotonic() + patience
    while not take_lock(descriptor, min(stopped_patience, max(0.0, deadline - time.monotonic()))):
        holder = holder_of(descriptor)
        is_stopped = holder is not None and holder.is_stopped
        if is_stopped or time.monotonic() >= deadline:
            who = "somebody" if holder is None else holder
            logger.warning("going on without the lock %s, which %s does not let go", path, who)
            return


def _unusable(path: Path | str, reason: str) -> str:
    return f"cannot use {shown(path)} for cached models: {reason}; set NBENGINE_CACHE_DIR to a writable directory"
