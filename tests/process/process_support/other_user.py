"""Another user of this machine tries to connect to an engine, to read, to plant a file, and to send
signals."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
from process_support.looks import looks

from nbengine.runtime.connection import connection_file, log_dir, read_connection

SAMPLE_SECONDS = 0.02
_LISTEN = "0A"
_ATTEMPTS = """
import errno, json, os, signal, socket, sys
what = json.load(sys.stdin)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
done = []
def attempt(name, act, *arguments):
    try:
        act(*arguments)
    except PermissionError:
        return
    except OSError as error:
        done.append(f"{name} {arguments}: {error}")
    else:
        done.append(f"{name} {arguments}")
def connect(path):
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
def plant(directory):
    os.close(os.open(os.path.join(directory, "planted"), os.O_CREAT | os.O_WRONLY))
for path in what["files"]:
    attempt("read", os.open, path, os.O_RDONLY)
    attempt("write", os.open, path, os.O_WRONLY)
for path in what["sockets"]:
    attempt("connect", connect, path)
for path in what["directories"]:
    attempt("list", os.listdir, path)
    attempt("plant", plant, path)
for pid in what["pids"]:
    attempt("kill", os.kill, pid, signal.SIGTERM)
    attempt("see the files of", os.listdir, f"/proc/{pid}/fd")
print(json.dumps(done))
"""


def reachable_ends() -> dict[str, str]:
    """Sockets of all processes that a stranger could send something to, by inode: listening TCP, bound UDP, and abstract UNIX
    sockets."""
    found = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in _lines(f"/proc/net/{kind}"):
            fields = line.split()
            if kind.startswith("udp") or fields[3] == _LISTEN:
                found[fields[9]] = f"{kind} {fields[1]}"
    for line in _lines("/proc/net/unix"):
        fields = line.split()
        if len(fields) == 8 and fields[7].startswith("@"):
            found[fields[6]] = f"unix {fields[7]}"
    return found


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()[1:]
    except FileNotFoundError:
        # A machine without IPv6.
        return []


def owned(ends: dict[str, str], processes: list[psutil.Process]) -> set[str]:
    """Those of `ends` that are sockets of `processes`."""
    found = set()
    for process in processes:
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            # It may have been closed meanwhile.
            with contextlib.suppress(OSError):
                inode = os.readlink(descriptor).removeprefix("socket:[").removesuffix("]")
                if inode in ends:
                    found.add(f"{ends[inode]} of process {process.pid}")
    return found


class EndsWatch:
    """Looks, while the block runs, at the sockets of this process and of all that it starts; `seen` has the reachable ones
    that were not there before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.num_looks = 0
        self._known: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ends-watch")

    def __enter__(self) -> Self:
        self._known = set(reachable_ends())
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        for _ in looks(SAMPLE_SECONDS):
            if self._over.is_set():
                return
            ends = reachable_ends()
            new = {inode: end for inode, end in ends.items() if inode not in self._known}
            if new:
                # Of other programs, or ours.
                own = psutil.Process()
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    self.seen |= owned(new, [own, *own.children(recursive=True)])
            self._known |= new.keys()
            self.num_looks += 1


def check_closed_to_strangers(name: str, watch: EndsWatch) -> None:
    """Check that a running engine, which this process has started under a `watch`, is its owner's alone."""
    info = read_connection(connection_file(name))
    processes = [psutil.Process(info.host_pid), *psutil.Process(info.host_pid).children(recursive=True)]
    assert watch.num_looks > 0
    assert watch.seen == set()
    assert owned(reachable_ends(), processes) == set()
    directories = {Path(info.run_dir), Path(info.tensor_dir), log_dir()}
    logs = {path for path in log_dir().iterdir() if path.name.startswith(Path(info.log_path).stem)}
    files = {connection_file(name), *logs}
    for directory in (Path(info.run_dir), Path(info.tensor_dir)):
        files.update(path for path in directory.rglob("*") if not path.is_dir())
        directories.update(path for path in directory.rglob("*") if path.is_dir())
    files.update(path for process in processes for path in _written_files(process))
    assert any(path.name == "host.sock" for path in files)
    assert any(str(path).startswith(info.log_path.removesuffix(".log")) for path in files)
    for path in directories:
        status = path.stat()
        assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o700, os.geteuid()), path
    sockets = set()
    for path in files:
        status = path.lstat()
        if stat.S_ISSOCK(status.st_mode):
            # A socket's own mode is the process's mask; its directory keeps others out.
            assert path.parent in directories
            sockets.add(path)
            continue
        assert (stat.S_IMODE(status.st_mode) & 0o177, status.st_uid) == (0, os.geteuid()), path
    if os.geteuid() == 0:
        pids = [os.getpid(), *(process.pid for process in processes)]
        assert _attempts_of_nobody(files - sockets, sockets, directories, pids) == []


def _written_files(process: psutil.Process) -> Iterator[Path]:
    """Files with a name that a process has open to write, or mapped so that it shares them."""
    for opened in process.open_files():
        if opened.mode != "r":
            yield Path(opened.path)
    for mapped in process.memory_maps(grouped=False):
        if "w" in mapped.perms and "s" in mapped.perms and Path(mapped.path).is_file():
            yield Path(mapped.path)


def _attempts_of_nobody(
    files: set[Path], sockets: set[Path], directories: set[Path], pids: list[int]
) -> list[str]:
    """List the attempts of the user `nobody` that were not refused."""
    what = {
        "files": sorted(map(str, files)),
        "sockets": sorted(map(str, sockets)),
        "directories": sorted(map(str, directories)),
        "pids": pids,
    }
    command = [sys.executable, "-I", "-S", "-c", _ATTEMPTS]
    done = subprocess.run(command, input=json.dumps(what), capture_output=True, text=True, check=True)
    attempts: list[str] = json.loads(done.stdout)
    return attempts
