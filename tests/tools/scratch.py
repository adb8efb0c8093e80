"""Scratch folders: everything that a run of tests, a benchmark or the demo writes lies in one, and goes with it.

A scratch folder is called after the process that owns it (`nbt-`, its pid, the ticks between boot and its start), and the
processes that the owner starts carry its path in their environment, or write into it. It is removed when the owner is done. If the owner was
killed, the next run finds that nobody owns the folder any more, ends the processes that are left of it, and removes the
shared memory of their engines and the folder. What a living process or another user owns is left alone.

`python -m tests.tools.scratch SCRIPT.py …` runs a script in a scratch folder of its own; it uses the user's cache.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbengine.ipc.liveness import (
    ProcessIdentity,
    identity_of,
    is_alive,
    machine_id,
    send_signal,
    this_process,
)
from nbengine.runtime.directories import RUN_DIR, SHARED_MEMORY, EngineDirectories, marker_of, note_place
from tests.tools import tests_cache

VARIABLE = "NBENGINE_SCRATCH"
NAME = re.compile(r"nbt-([0-9a-z]{1,7})-([0-9a-z]{1,9})")
MACHINE = "machine"
"""A file in the folder: where its owner's pid means something, and, by its age, when the owner began."""
LONGEST_PARENT = 16
"""Bytes that the temporary folder's path may have: Ray adds 86 to it, and a socket's path takes 107."""
END_SECONDS = 20.0
UNMARKED_SECONDS = 60.0
"""A folder without `MACHINE` may be one that is being made in another pid namespace."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_OWN = {"TMPDIR": "", "XDG_RUNTIME_DIR": "", "IPYTHONDIR": "ipython", VARIABLE: ""}
_OWN |= {f"JUPYTER_{kind}_DIR": f"jupyter-{kind.lower()}" for kind in ("CONFIG", "DATA")}
"""Environment variables of all processes, and the folders inside that they name."""


@dataclass(frozen=True)
class Scratch:
    """The scratch folder of this process, and what its environment was before."""

    path: Path
    before: dict[str, str | None]
    cache: Path | None

    def leave(self) -> list[str]:
        """Remove the folder; return descriptions of processes that would have outlived it, and were ended."""
        ended = clear(self.path)
        if self.cache is not None:
            tests_cache.prune(self.cache, _oldest_start(self.path.parent))
        _set_environment(self.before)
        return ended


def enter(*, own_cache: bool = True) -> Scratch | None:
    """Remove what is nobody's, and have this process and those that it starts use a new scratch folder.

    With `own_cache` their cache is the one of all tests, and not the user's. The result is None in a process that is in a
    scratch folder of its own already.
    """
    outer = os.environ.get(VARIABLE)
    if outer and owner_of(Path(outer).name) == this_process():
        return None
    parent = _parent(outer)
    sweep(parent)
    path = parent / name_of(this_process())
    path.mkdir(mode=0o700)
    (path / MACHINE).write_text(machine_id())
    wanted: dict[str, str | None] = {name: str(path / inner) for name, inner in _OWN.items()}
    cache = None
    # A run inside another one shares its cache, and leaves the care for it to the other.
    if own_cache and not outer:
        cache = tests_cache.make()
        wanted["NBENGINE_CACHE_DIR"] = str(cache)
        tests_cache.prune(cache, _oldest_start(parent))
        tests_cache.adopt(cache)
    before = {name: os.environ.get(name) for name in wanted}
    _set_environment(wanted)
    return Scratch(path, before, cache)


@contextlib.contextmanager
def entered(*, own_cache: bool = True) -> Iterator[None]:
    """Be in a scratch folder within the block."""
    folder = enter(own_cache=own_cache)
    try:
        yield
    finally:
        if folder is not None:
            folder.leave()


def name_of(owner: ProcessIdentity) -> str:
    """Return the name of a process's scratch folder. It is short: paths of sockets are."""
    return f"nbt-{_to_36(owner.pid)}-{_to_36(owner.started)}"


def owner_of(name: str) -> ProcessIdentity | None:
    """Return the process that a scratch folder is called after; None: the name is no scratch folder's."""
    found = NAME.fullmatch(name)
    return ProcessIdentity(int(found[1], 36), int(found[2], 36)) if found else None


def sweep(parent: Path) -> list[str]:
    """Remove all scratch folders of this user in `parent` that nobody owns any more, and end what is left of their
    processes; return descriptions of those processes."""
    ended = []
    for path in _folders(parent):
        if is_abandoned(path):
            ended += clear(path)
    # The folder may be gone, and a process of it still there.
    carried = {folder for _, path in _inhabitants() for folder in (path, *path.parents)}
    for path in carried:
        owner = owner_of(path.name)
        if owner and path.parent == parent and not path.exists() and not is_alive(owner):
            ended += clear(path)
    return ended


def is_abandoned(path: Path) -> bool:
    """Return whether a folder is a scratch folder of this user whose owner has ended."""
    owner = owner_of(path.name)
    if owner is None:
        return False
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return False
        machine = _read(path / MACHINE)
    except OSError:
        return False
    if machine in (None, machine_id()):
        settled = machine is not None or time.time() - status.st_mtime > UNMARKED_SECONDS
        return settled and not is_alive(owner)
    # Its pid means nothing here: it is of an earlier boot, or of another container, which may run.
    assert machine is not None
    another_boot = machine.split(":")[0] != machine_id().split(":")[0]
    # It imports torch, which the demo and the tests of notebooks need in none of their own processes.
    from nbengine.models.checkpoints.packed_store import is_remote

    return another_boot and not is_remote(path.parent)


def clear(path: Path) -> list[str]:
    """End the processes of a scratch folder but those that end with this one, and remove all that is in it, the
    shared memory of its engines, and the folder."""
    ended = _end_processes(path)
    for run_dir in _run_dirs(path):
        # They are removed as the product does, which looks twice that they are an engine's.
        shared = SHARED_MEMORY / f"nbengine-{run_dir.parent.name}-{run_dir.name}"
        note_place(str(run_dir))
        EngineDirectories(str(run_dir), str(shared), marker_of(run_dir)).remove()
    for shared in SHARED_MEMORY.glob(f"nbengine-{path.name}-*"):
        _remove(shared)
    for entry in path.iterdir() if path.is_dir() else ():
        # The mark goes last: another run finishes a removal that breaks off.
        if entry.name != MACHINE:
            _remove(entry)
    _remove(path)
    return ended


def shared_memory_prefix() -> str:
    """Return how names in shared memory begin that go with this process's scratch folder."""
    return f"nbengine-{Path(os.environ.get(VARIABLE) or tempfile.gettempdir()).name}-"


def _end_processes(path: Path) -> list[str]:
    """Kill the processes of a scratch folder until there are none; those below this process end with it."""
    ended: dict[ProcessIdentity, str] = {}
    end = time.monotonic() + END_SECONDS
    while True:
        spared = {os.getpid(), *_below(os.getpid())}
        pids = {process.pid for process, own in _inhabitants() if own == path or path in own.parents} - spared
        if not pids or time.monotonic() > end:
            return list(ended.values())
        for process in map(identity_of, pids.union(*map(_below, pids)) - spared):
            if process is None:
                continue
            with contextlib.suppress(psutil.Error):
                ended.setdefault(process, " ".join(psutil.Process(process.pid).cmdline())[:200].strip())
            with contextlib.suppress(OSError):
                send_signal(process, signal.SIGKILL)
        time.sleep(0.02)


def _below(pid: int) -> set[int]:
    """Return the processes that a process has started, and those that these have started."""
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def _inhabitants() -> Iterator[tuple[ProcessIdentity, Path]]:
    """Yield this user's processes that carry a scratch folder in their environment, and the folder; and those whose
    output is a file, and the file: a process that has taken a title shows no environment.

    What has another pid namespace, such as a container's tests, has owners whose pids mean nothing here.
    """
    namespace = _namespace("self")
    for pid in psutil.pids():
        process = identity_of(pid)
        # Who has no /proc finds nobody.
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{pid}")
            if process is None or place.stat().st_uid != os.geteuid() or _namespace(pid) != namespace:
                continue
            for entry in (place / "environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == VARIABLE.encode():
                    yield process, Path(os.fsdecode(value))
            for output in (1, 2):
                with contextlib.suppress(FileNotFoundError):
                    yield process, (place / "fd" / str(output)).readlink()


def _namespace(pid: int | str) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def _folders(parent: Path) -> list[Path]:
    return [path for path in parent.glob("nbt-*") if NAME.fullmatch(path.name)]


def _oldest_start(parent: Path) -> float:
    """Return when the first of the living owners in `parent` began; infinity: there is none."""
    starts = [float("inf")]
    for path in _folders(parent):
        if not is_abandoned(path):
            with contextlib.suppress(OSError):
                starts.append((path / MACHINE).stat().st_mtime)
    return min(starts)


def _run_dirs(path: Path) -> list[Path]:
    found = []
    for folder, names, _ in os.walk(path):
        found += [Path(folder) / name for name in names if RUN_DIR.fullmatch(name)]
    return found


def _parent(outer: str | None) -> Path:
    """Return where this process's scratch folder is made: inside the one that it was started in, if there is one."""
    if outer and Path(outer).is_dir():
        return Path(outer)
    usual = Path(tempfile.gettempdir())
    short = Path("/tmp")
    if len(os.fsencode(usual)) > LONGEST_PARENT and os.access(short, os.W_OK | os.X_OK):
        return short
    return usual


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # What the module found in the environment it does not look up again.
    tempfile.tempdir = None


def _remove(path: Path) -> None:
    """Remove a file or a folder; what cannot be removed is left for the next run."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return
    # Tests close folders to themselves.
    _open_up(path)
    for folder, names, _ in os.walk(path):
        for name in names:
            _open_up(Path(folder) / name)
    shutil.rmtree(path, ignore_errors=True)


def _open_up(path: Path) -> None:
    with contextlib.suppress(OSError):
        if not path.is_symlink() and path.stat().st_mode & 0o700 != 0o700:
            path.chmod(0o700)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None


def _to_36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = _DIGITS[digit] + digits
    return digits or "0"


def main(arguments: list[str]) -> None:
    """Run a script as Python would, in a scratch folder."""
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    with entered(own_cache=False):
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
