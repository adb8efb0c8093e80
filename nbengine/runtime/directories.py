"""The directories of an engine. This module makes them, and only this module removes them.

A *run directory* (0700, short path) holds an engine's sockets, a *tensor directory* (0700, in `/dev/shm`
where there is one) its shared memory. The names of those to remove come from files that anybody may have
written. So a directory is removed only if it has the owner, mode, place and name of those that are made here,
and holds a *marker*, random text that the connection file has, too. The checks and the removal go through one
descriptor of the directory: no link is followed, no mount crossed, and a directory that takes its place
meanwhile is left alone.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nbengine.errors import EngineStartError, NBEngineError, shown
from nbengine.ipc.private import is_private_directory, opened_directory, read_own, reason_of

logger = logging.getLogger(__name__)
_removing = threading.Lock()

MAX_SOCKET_PATH = 100
"""Bytes that a UNIX socket path may have on every platform we care for (macOS: 104)."""
SHARED_MEMORY = Path("/dev/shm")
RUN_DIR = re.compile(r"nbe-[a-z0-9_]{8}")
MARKER = "marker"
_TENSORS = "tensors"
_CLIENT_SOCKET = re.compile(r"c-[A-Za-z0-9_-]+\.(in|out)")
_LONGEST_SOCKET_NAME = len("c-01234567.out")
_MARKER_BYTES = 32
_PASSES = 3
"""Times that a directory is emptied, since a process that is ending may still make files in it."""

_noted: set[str] = set()
"""Parents of the directories that this process has made, or was given by the process that started it."""


@dataclass(frozen=True, slots=True)
class EngineDirectories:
    """A run directory, the tensor directory that goes with it, and the marker in both."""

    run_dir: str
    tensor_dir: str
    marker: str

    @classmethod
    def make(cls) -> EngineDirectories:
        """Make a run directory and a tensor directory with one marker.

        Raises:
            EngineStartError: no place takes them; the message says what was tried, and what to do.
        """
        marker = secrets.token_hex(_MARKER_BYTES // 2)
        run_dir = _make_run_dir(marker)
        return cls(run_dir, _make_tensor_dir(run_dir, marker), marker)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the tensor directory, unless it lies in the run directory, and the run directory."""
        shared = self.tensor_dir and self.tensor_dir != os.path.join(self.run_dir, _TENSORS)
        return (self.tensor_dir, self.run_dir) if shared else (self.run_dir,)

    def remove(self) -> None:
        """Remove both directories with all that is in them;
        one that may not be the engine's is left, and logged.

        It is no error where they are gone already.
        """
        # What another process is removing counts as gone. Another thread of this one must be waited for: the
        # caller may end the process next.
        with _removing:
            for path in self.paths:
                try:
                    _remove(path, self._place_of(path), self.marker)
                except FileNotFoundError:
                    continue
                except (OSError, NBEngineError, ValueError) as error:
                    reason = str(error) if isinstance(error, NBEngineError) else reason_of(error)
                    logger.warning("%s is left alone: %s", shown(path), reason)

    def _place_of(self, path: str) -> str:
        """Return the directory that `path` must lie in;
        raises `NBEngineError` if it has no place or name of ours."""
        parent, name = os.path.split(path)
        if path != self.run_dir:
            if path != _shared_path(self.run_dir):
                raise NBEngineError("it is not where the tensors of an engine are")
            return parent
        if not RUN_DIR.fullmatch(name):
            raise NBEngineError("no run directory of an engine has such a name")
        if parent not in places():
            raise NBEngineError(f"engines of this user do not have their run directories in {shown(parent)}")
        return parent


def finish_removals() -> None:
    """Wait for removals on other threads, and let none begin any more; called at the end of a process."""
    _removing.acquire()


def places() -> list[str]:
    """List the directories in which this user's engines have their run directories, the best first."""
    candidates = [os.environ.get("XDG_RUNTIME_DIR", ""), *_temporary(), "/tmp", f"/run/user/{os.geteuid()}"]
    # A relative path means something else to other processes, and one that is no text cannot be sent to them.
    usable = [os.path.normpath(place) for place in candidates if os.path.isabs(place) and _is_text(place)]
    return list(dict.fromkeys([*usable, *_noted]))


def note_place(run_dir: str) -> None:
    """Remember the parent of `run_dir`, which the process that started this one has made:
    its environment may have differed."""
    _noted.add(os.path.dirname(os.path.abspath(run_dir)))


def remove_client_socket(run_dir: str, path: str) -> None:
    """Remove the file of a client's socket in a run directory; leave any other file alone."""
    parent, name = os.path.split(path)
    if parent != run_dir or not _CLIENT_SOCKET.fullmatch(name):
        return
    with contextlib.suppress(OSError), opened_directory(run_dir) as directory:
        if stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)


def marker_of(directory: str | Path) -> str:
    """Read the marker in a directory that was made here; empty if it has none."""
    with contextlib.suppress(OSError, NBEngineError, UnicodeDecodeError):
        return read_own(os.path.join(directory, MARKER), _MARKER_BYTES)[0].decode()
    return ""


def _temporary() -> list[str]:
    # The system may have no temporary directory that can be written.
    with contextlib.suppress(OSError):
        return [tempfile.gettempdir()]
    return []


def _is_text(path: str) -> bool:
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in path


def _make_run_dir(marker: str) -> str:
    tried = []
    for parent in places():
        room = MAX_SOCKET_PATH - len(os.fsencode(parent)) - len("/nbe-01234567/") - _LONGEST_SOCKET_NAME
        if room < 0:
            tried.append(f"{shown(parent)} (its path is {-room} bytes too long)")
            continue
        try:
            made = tempfile.mkdtemp(prefix="nbe-", dir=parent)
            _mark(made, marker)
        except (OSError, ValueError) as error:
            tried.append(f"{shown(parent)} ({reason_of(error)})")
            continue
        note_place(made)
        return made
    raise EngineStartError(
        f"there is no directory for the engine's sockets: {', '.join(tried)}; set TMPDIR to one that can be written, has "
        f"room, and a path of at most {MAX_SOCKET_PATH - len('/nbe-01234567/') - _LONGEST_SOCKET_NAME} bytes"
    )


def _make_tensor_dir(run_dir: str, marker: str) -> str:
    """Make the tensor directory in `SHARED_MEMORY`, named after the run directory and its parent,
    or else in `run_dir`."""
    shared = _shared_path(run_dir)
    try:
        os.mkdir(shared, 0o700)
        _mark(shared, marker)
    except OSError:
        inside = os.path.join(run_dir, _TENSORS)
        try:
            os.mkdir(inside, 0o700)
        except OSError as error:
            EngineDirectories(run_dir, inside, marker).remove()
            raise EngineStartError(
                f"the engine's directory {inside} cannot be made: {reason_of(error)}"
            ) from error
        return inside
    return shared


def _shared_path(run_dir: str) -> str:
    parent, name = os.path.split(run_dir)
    return str(SHARED_MEMORY / f"nbengine-{os.path.basename(parent)}-{name}")


def _mark(directory: str, marker: str) -> None:
    """Put the marker into a directory that was just made; the directory goes if that fails."""
    try:
        path = os.path.join(directory, MARKER)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o600)) as file:
            file.write(marker.encode())
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        with contextlib.suppress(OSError):
            os.rmdir(directory)
        raise


def _remove(path: str, parent: str, marker: str) -> None:
    """Remove `path` in `parent` if it is marked; raises `FileNotFoundError` if it does not exist."""
    name = os.path.basename(path)
    # The parent is named by this process's own settings, and may be a link.
    with opened_directory(parent, follow=True) as outer, opened_directory(name, outer) as directory:
        status = os.fstat(directory)
        if not is_private_directory(status):
            raise NBEngineError("it is not this user's alone (0700)")
        mount = _mount_of(directory)
        if mount != _mount_of(outer):
            raise NBEngineError("something is mounted there")
        if not _has_marker(directory, marker):
            raise NBEngineError("it has no marker of that engine")
        for _ in range(_PASSES):
            _empty(directory, mount, MARKER)
            if {*os.listdir(directory)} <= {MARKER}:
                break
        else:
            raise NBEngineError("somebody still makes files in it")
        # The marker goes last, so that another process may finish a removal that breaks off here.
        os.unlink(MARKER, dir_fd=directory)
        now = os.stat(name, dir_fd=outer, follow_symlinks=False)
        if not os.path.samestat(now, status):
            raise NBEngineError("something else has come to its place")
        os.rmdir(name, dir_fd=outer)


def _has_marker(directory: int, marker: str) -> bool:
    try:
        content, _ = read_own(MARKER, _MARKER_BYTES, directory)
    except FileNotFoundError:
        if os.listdir(directory):
            return False
        # Another process is removing it right now.
        raise
    return len(marker) == _MARKER_BYTES and marker.isascii() and hmac.compare_digest(content, marker.encode())


def _empty(directory: int, mount: tuple[int, bytes], kept: str = "") -> None:
    """Empty a directory but for the file `kept`; links are not followed, and a mount is an error."""
    for name, is_directory in list(_entries(directory)):
        if name == kept:
            continue
        with contextlib.suppress(FileNotFoundError):
            if not is_directory:
                os.unlink(name, dir_fd=directory)
                continue
            with opened_directory(name, directory) as inner:
                if _mount_of(inner) != mount:
                    raise NBEngineError(f"something is mounted on its {shown(name)}")
                _empty(inner, mount)
            os.rmdir(name, dir_fd=directory)


def _entries(directory: int) -> Iterator[tuple[str, bool]]:
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _mount_of(descriptor: int) -> tuple[int, bytes]:
    """Return a value that is equal for two directories of one mount;
    Linux also tells two mounts of one file system apart."""
    number = b""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{descriptor}", "rb") as lines:
        number = next((line for line in lines if line.startswith(b"mnt_id:")), b"")
    return os.fstat(descriptor).st_dev, number
