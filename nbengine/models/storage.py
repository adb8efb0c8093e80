"""The model cache on disk: where it is, whole-directory writes, and locks between processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from nbengine.errors import ModelLoadError

if sys.platform != "win32":
    import fcntl


def cache_dir() -> Path:
    """Directory of everything that nbengine keeps between runs.

    `NBENGINE_CACHE_DIR`, else `nbengine` under `XDG_CACHE_HOME`, else `~/.cache/nbengine`. It need not exist.
    """
    configured = os.environ.get("NBENGINE_CACHE_DIR")
    if configured:
        return Path(configured).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    root = Path(base).expanduser() if base else Path.home() / ".cache"
    return root.absolute() / "nbengine"


def make_directory(path: Path) -> Path:
    """Create `path` and its parents where they are missing.

    Raises:
        ModelLoadError: it cannot be created or is not writable; the message says how to choose another.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK | os.X_OK)
    except OSError as error:
        raise ModelLoadError(_unusable(path, str(error))) from error
    if not writable:
        raise ModelLoadError(_unusable(path, "it is not writable"))
    return path


@contextlib.contextmanager
def staging_directory(parent: Path) -> Iterator[Path]:
    """A fresh directory inside `parent` (so that renames out of it are atomic), removed afterwards."""
    make_directory(parent)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=parent))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


@contextlib.contextmanager
def new_directory(destination: Path) -> Iterator[Path]:
    """A directory to fill that appears as `destination`, complete, when the block ends without an error.

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
def file_lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock on `path` (created if missing); `on_wait` is called when another process has it.

    The lock only saves work: every file in the cache appears by an atomic rename, so that without locks
    (Windows, some network file systems) two processes fetch twice but never see half a file.
    """
    make_directory(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(descriptor, on_wait)
        yield
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, on_wait: Callable[[], None]) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:
        return  # a file system without locks


def _unusable(path: Path, reason: str) -> str:
    return f"cannot use {path} for cached models: {reason}; set NBENGINE_CACHE_DIR to a writable directory"
