"""Directories and shared memory that no other user can reach."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from nbengine.errors import NBEngineError


def check_private(directory: str | Path, what: str) -> None:
    """Raise `NBEngineError` unless `directory`, called `what`, is there and is this user's alone."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        raise NBEngineError(f"{what} {directory} is not here: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise NBEngineError(f"{what} {directory} is not this user's alone")


@contextlib.contextmanager
def opened(path: str | Path, flags: int = 0) -> Iterator[int]:
    """A descriptor of the file, not of what a link leads to, to read and write; a new file is its owner's alone (0600).

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_shared(path: str | Path, size: int) -> mmap.mmap:
    """Make a file of `size` bytes, all zero, and map it.

    Its memory is reserved: a `/dev/shm` that is too small is an error now, not a SIGBUS later.

    Raises:
        OSError: there is no room for it, or it is there already.
    """
    with opened(path, os.O_CREAT | os.O_EXCL) as descriptor:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.write(descriptor, bytes(size))
            return mmap.mmap(descriptor, size)
        except BaseException:
            os.unlink(path)
            raise


def map_shared(path: str | Path, size: int) -> mmap.mmap:
    """Map the file that another process of this user has made with `make_shared`.

    Raises:
        OSError: it cannot be opened.
        NBEngineError: it is not that file.
    """
    with opened(path) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != size:
            raise NBEngineError(f"{path} is not the file of {size} bytes that was handed over")
        return mmap.mmap(descriptor, size)
