"""The weights that were brought into the layout of the kernels, kept on disk: later starts map them, and all
engines of a machine have them in memory once."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from nbengine.errors import ModelLoadError, NBEngineError, shown
from nbengine.ipc.private import (
    check_private,
    make_own_directory,
    opened,
    opened_directory,
    opened_own,
    reason_of,
)
from nbengine.models.checkpoints.packed_file import (
    Bytes,
    PackedFile,
    Reading,
    contents,
    description_of,
    most_bytes,
)
from nbengine.models.checkpoints.storage import cache_dir
from nbengine.runtime.locks import take_lock

logger = logging.getLogger(__name__)

LIMIT_VARIABLE = "NBENGINE_PACKED_WEIGHTS_GIB"
DEFAULT_GIB = 32.0
FREE_SHARE = 4
"""The files take at most one part in this many of the disk space that is free without them."""
_NAME = "the directory of packed weights"
_SUFFIX = ".weights"
_TEMPORARY = ".tmp"
_LOCK_SECONDS = 0.2
_REMOTE = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "9p",
    "afs",
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "virtiofs",
}
_MOUNTS = Path("/proc/self/mountinfo")


class PackedStore:
    """Files of weights in a directory of this user's; those that were used last take at most `limit` bytes.

    Whatever happens to the directory harms nobody: what cannot be read is made again, and what cannot be
    written is not kept. A file in use may be removed; it may not be changed, and nothing here does.
    """

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    @contextlib.contextmanager
    def opened(self, name: str, key: str, sizes: Sequence[int]) -> Iterator[PackedFile | None]:
        """Give a file whose description is good; None: it has to be made. What is no good is removed."""
        with contextlib.ExitStack() as stack:
            found = None
            if self._is_usable():
                path = self._path(name, key)
                try:
                    descriptor, _ = stack.enter_context(opened_own(path))
                    found = PackedFile.read(descriptor, key, sizes)
                    # Its age says how long it has not been used. The disk may be read-only.
                    with contextlib.suppress(OSError):
                        os.utime(path)
                except FileNotFoundError:
                    pass
                except (OSError, NBEngineError) as error:
                    self.remove(name, key, error)
            yield found

    def remove(self, name: str, key: str, error: OSError | NBEngineError) -> None:
        """Remove a file that is no good."""
        path = self._path(name, key)
        reason = str(error) if isinstance(error, NBEngineError) else reason_of(error)
        about = reason if str(path) in reason else f"{shown(path)} {reason}"
        logger.warning("the weights are packed again: %s", about)
        with contextlib.suppress(OSError):
            path.unlink()

    def write(self, name: str, key: str, source: str, regions: Sequence[Bytes], reading: Reading) -> None:
        """Write a file, unless it is there already; one process writes at a time.

        Regions are read in the contexts that `reading` gives, each of them short; the writing ends when one
        raises.

        Raises:
            OSError, NBEngineError: it cannot be written; nothing is left of it.
        """
        make_own_directory(self._directory, _NAME, "set NBENGINE_CACHE_DIR")
        check_private(self._directory, _NAME)
        if is_remote(self._directory):
            raise NBEngineError(f"{shown(self._directory)} is on a network file system")
        path = self._path(name, key)
        with opened_directory(self._directory) as lock:
            while not take_lock(lock, _LOCK_SECONDS):
                with reading():
                    pass
            self._remove_leftovers()
            if path.exists():
                return
            self._make_room(most_bytes(map(len, regions)))
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
            try:
                _write(temporary, key, source, regions, reading)
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def _is_usable(self) -> bool:
        try:
            check_private(self._directory, _NAME)
        except NBEngineError as error:
            # The first start finds no directory, which needs no warning.
            level = logging.WARNING if os.path.lexists(self._directory) else logging.DEBUG
            logger.log(level, "the weights are packed again: %s", error)
            return False
        return not is_remote(self._directory)

    def _remove_leftovers(self) -> None:
        """Remove what writers have left that were killed; this process has the lock, so none is at work."""
        for path in self._directory.iterdir():
            if path.suffix == _TEMPORARY:
                path.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the files that have not been used for longest until there is room for a new one."""
        held = sorted((_last_use(path), path) for path in self._directory.iterdir() if path.suffix == _SUFFIX)
        total = sum(size for (_, size), _ in held)
        allowed = min(self._limit, (shutil.disk_usage(self._directory).free + total) // FREE_SHARE)
        if num_bytes > allowed:
            raise NBEngineError(
                f"they take {num_bytes >> 20} MiB of the disk, and {allowed >> 20} MiB are allowed "
                f"({LIMIT_VARIABLE}, and a quarter of what is free)"
            )
        for (_, size), path in held:
            if total + num_bytes <= allowed:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, name: str, key: str) -> Path:
        return self._directory / f"{name}-{key[:32]}{_SUFFIX}"


def packed_store() -> PackedStore | None:
    """Return the store of this user; None: nothing is to be kept.

    Raises:
        ModelLoadError: the environment's limit is no number.
    """
    text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_GIB)
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 <= limit < math.inf:
        raise ModelLoadError(f"{LIMIT_VARIABLE} must be a number of GiB, 0 or more, got {shown(text)}")
    try:
        return PackedStore(cache_dir() / "weights", int(limit * 2**30)) if limit else None
    except ModelLoadError as error:
        logger.info("packed weights are not kept: %s", error)
        return None


def is_remote(directory: Path) -> bool:
    """Return whether a directory is known to be on a file system of other machines, which may take away a
    mapped file's pages."""
    try:
        number = os.stat(directory).st_dev
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    device = f"{os.major(number)}:{os.minor(number)}"
    for mount in mounts:
        left, _, right = mount.partition(" - ")
        kind = right.split(" ")[0]
        if left.split(" ")[2:3] == [device] and (kind in _REMOTE or kind.startswith("fuse")):
            return True
    return False


def _write(path: Path, key: str, source: str, regions: Sequence[Bytes], reading: Reading) -> None:
    with opened(path, os.O_CREAT | os.O_EXCL) as descriptor:
        description = description_of(key, source, regions, reading)
        for offset, part in contents(description, regions):
            with reading():
                _write_all(descriptor, part, offset)
        # An error of the disk is seen now, not when a page is read again.
        os.fsync(descriptor)


def _write_all(descriptor: int, part: memoryview, offset: int) -> None:
    while part:
        done = os.pwrite(descriptor, part, offset)
        part, offset = part[done:], offset + done


def _last_use(path: Path) -> tuple[float, int]:
    """Return when a file was used last, and what it takes of the disk."""
    try:
        status = path.stat()
    except OSError:
        return 0.0, 0  # another process has dropped it
    return status.st_mtime, 512 * status.st_blocks
