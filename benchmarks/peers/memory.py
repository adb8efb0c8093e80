"""The resident memory of an engine's processes, and what it consists of, as Linux tells it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self

KINDS = ("weights", "libraries", "shared memory", "other files", "anonymous")
"""The kinds of pages; those of weights are known only where a file with them is mapped."""
WEIGHTS_BYTES = 1 << 20
"""A mapped file that is no library is taken for weights from this size on."""
WATCH_SECONDS = 0.05
"""Seconds between two readings of a watched engine's memory."""


def kind_of(path: str, model: str, file_bytes: int) -> str:
    """Return the kind of a mapping, from its file's path and size.

    A large file is the model's own or one that an engine has made of it; programs and libraries are known by
    their names.
    """
    name = path.rpartition("/")[2]
    if path.startswith(("/dev/shm/", "/memfd:", "/SYSV", "/dev/zero")):
        return "shared memory"
    if not path.startswith("/"):
        return "anonymous"
    if path == model:
        return "weights"
    if ".so" in name or "/bin/" in path:
        return "libraries"
    return "weights" if file_bytes >= WEIGHTS_BYTES and not path.startswith("/usr/") else "other files"


def read_smaps(text: str, model: str) -> dict[str, Counter[str]]:
    """Add up the pages of `/proc/PID/smaps`: bytes by kind, as "rss" and as "pss" (a page that n processes
    share counts 1/n)."""
    found: dict[str, Counter[str]] = {"rss": Counter(), "pss": Counter()}
    kind = "anonymous"
    for line in text.splitlines():
        label, _, value = line.partition(":")
        if label in ("Rss", "Pss"):
            found[label.lower()][kind] += int(value.split()[0]) * 1024
        elif " " in label:
            # The line that opens a mapping: "from-to mode offset device inode path".
            fields = line.split(maxsplit=5)
            begin, _, end = fields[0].partition("-")
            size = int(end, 16) - int(begin, 16)
            kind = kind_of(fields[5] if len(fields) > 5 else "", model, size)
    return found


def resident(pids: list[int], model: str) -> dict[str, Any]:
    """Return the memory of processes: `rss` and `pss` in bytes, `kinds` (the pss by kind) and `processes`
    (the pss by pid)."""
    rss, kinds, processes = 0, Counter[str](), {}
    for pid in pids:
        found = read_smaps(Path(f"/proc/{pid}/smaps").read_text(), model)
        rss += found["rss"].total()
        kinds += found["pss"]
        processes[str(pid)] = found["pss"].total()
    return {"rss": rss, "pss": kinds.total(), "kinds": dict(kinds), "processes": processes}


class Watch:
    """Reads the memory of an engine's processes again and again while its block runs; `last` is what was read last.

    Engines may give keys and values back when a request ends, so that later their memory is not that of a request. It
    is read by a process of its own: an engine may keep the interpreter to itself.
    """

    def __init__(self, pids: list[int], model: str) -> None:
        self.last: dict[str, Any] = {}
        self._command = [sys.executable, "-m", "peers.memory", "--watch", model, *map(str, pids)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        # The first reading is there: the process has started, which takes longer than some runs.
        self._process.stdout.readline()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found, _ = self._process.communicate()
        if error is None:
            self.last = json.loads(found)


def watch(pids: list[int], model: str) -> None:
    """Read memory until the standard input ends, and print the last reading that had ended before."""
    found = resident(pids, model)
    print(flush=True)
    while not select.select([sys.stdin], [], [], WATCH_SECONDS)[0]:
        reading = resident(pids, model)
        if not select.select([sys.stdin], [], [], 0)[0]:
            found = reading
    print(json.dumps(found))


def main() -> None:
    """Print what this process takes after importing a module, `python -m peers.memory MODULE`, or watch others,
    `--watch MODEL PID PID`."""
    if sys.argv[1] == "--watch":
        watch([int(pid) for pid in sys.argv[3:]], sys.argv[2])
        return
    import_module(sys.argv[1])
    print(json.dumps(resident([os.getpid()], "")))


if __name__ == "__main__":
    main()
