"""Directories, files and shared memory that no other user can reach."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from nbengine.errors import NBEngineError, shown

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO))
"""Error numbers of a file system that takes nothing now, and may again later."""


def check_private(directory: str | Path, what: str) -> None:
    """Raise `NBEngineError` unless `directory`, called `what`, exists and is this user's alone."""
    try:
        status = os.lstat(directory)
    except OSError as error:
        raise NBEngineError(f"{what} {directory} is not here: {error}") from error
    if not is_private_directory(status):
        raise NBEngineError(f"{what} {directory} is not this user's alone")


def is_private_directory(status: os.stat_result) -> bool:
    """Return whether a file status is that of a directory of this user's alone (0700)."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def make_own_directory(path: Path, what: str, remedy: str) -> Path:
    """Make `path`, called `what`, and its missing parents (0700), and check that nobody else rules there.

    Raises:
        NBEngineError: it cannot be made, belongs to another user, or lets all others remove what is not
            theirs. The message ends with `remedy`.
    """
    try:
        # The engine's files name it in UTF-8.
        str(path).encode()
        try:
            status = os.stat(path)
        except FileNotFoundError:
            status = None
        if status is None or not stat.S_ISDIR(status.st_mode):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.stat(path)
    except (OSError, ValueError) as error:
        raise NBEngineError(f"{what} {shown(path)} cannot be used: {reason_of(error)}; {remedy}") from error
    if status.st_uid != os.geteuid():
        raise NBEngineError(f"{what} {shown(path)} belongs to another user (uid {status.st_uid}); {remedy}")
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        raise NBEngineError(
            f"{what} {shown(path)} lets every user replace what is in it; chmod o-w it, or {remedy}"
        )
    return path


def reason_of(error: OSError | ValueError | RuntimeError) -> str:
    """Return the system's reason for an error, in a few words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


@contextlib.contextmanager
def opened(path: str | Path, flags: int = 0) -> Iterator[int]:
    """Open a file, not what a link leads to, to read and write; a new file is its owner's alone (0600).

    Raises:
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_directory(path: str | Path, dir_fd: int | None = None, *, follow: bool = False) -> Iterator[int]:
    """Open a directory, with `dir_fd` the one called `path` in that directory.

    `follow` also takes a link to one.

    Raises:
        OSError: there is no such directory, or it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def check_own(descriptor: int, path: str | Path) -> os.stat_result:
    """Return the status of an open file; raise `NBEngineError` unless it is a plain file of this user's that
    nobody else can write."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise NBEngineError(f"{shown(path)} is not used: it is not a plain file")
    if status.st_uid != os.geteuid():
        raise NBEngineError(f"{shown(path)} is not used: it belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o022:
        raise NBEngineError(f"{shown(path)} is not used: others can write it (chmod go-w it if it is good)")
    return status


@contextlib.contextmanager
def opened_own(path: str | Path, dir_fd: int | None = None) -> Iterator[tuple[int, os.stat_result]]:
    """Open a plain file of this user's that nobody else can write, to read; yield its descriptor and status.

    This waits for no pipe or device, and follows no link.

    Raises:
        FileNotFoundError: it is not there.
        NBEngineError: it cannot be opened, or is not such a file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        is_link = isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.EMLINK)
        reason = "it is a link" if is_link else reason_of(error)
        raise NBEngineError(f"{shown(path)} is not used: {reason}") from error
    try:
        yield descriptor, check_own(descriptor, path)
    finally:
        os.close(descriptor)


def read_own(path: str | Path, limit: int, dir_fd: int | None = None) -> tuple[bytes, os.stat_result]:
    """Return content and status of a file that `opened_own` opens and that has at most `limit` bytes.

    Raises:
        FileNotFoundError: it is not there.
        NBEngineError: it is larger, cannot be read, or is not such a file.
    """
    with opened_own(path, dir_fd) as (descriptor, status):
        try:
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                # What is asked for is allocated.
                content = file.read(min(limit, status.st_size) + 1)
        except OSError as error:
            raise NBEngineError(f"{shown(path)} cannot be read: {reason_of(error)}") from error
        if len(content) > limit:
            raise NBEngineError(f"{shown(path)} is not used: it has more than {limit >> 20} MiB")
        return content, status


def write_own(path: Path, content: bytes) -> None:
    """Write a file (0600), in the place of an old one if there is one;
    no reader and no failure leaves half of it.

    Raises:
        OSError: it cannot be written; the error names `path`, and an old file is still there.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        try:
            with opened(temporary, os.O_CREAT | os.O_EXCL) as descriptor:
                with os.fdopen(descriptor, "wb", closefd=False) as file:
                    file.write(content)
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise OSError(error.errno, reason_of(error), str(path)) from error


def make_shared(path: str | Path, size: int) -> mmap.mmap:
    """Make a file of `size` bytes, all zero, and map it.

    Its memory is reserved: a `/dev/shm` that is too small is an error now, not a SIGBUS later.

    Raises:
        OSError: there is no room for it, or a file has this name already.
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
        NBEngineError: the file at `path` is not that file.
    """
    with opened(path) as descriptor:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != size:
            raise NBEngineError(f"{path} is not the file of {size} bytes that was handed over")
        return mmap.mmap(descriptor, size)
