"""The resident memory of an engine's processes, and what it consists of, as Linux tells it."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

KINDS = ("weights", "libraries", "shared memory", "other files", "anonymous")
"""The kinds of pages; those of weights are known only where a file with them is mapped."""
WEIGHTS_BYTES = 1 << 20
"""A mapped file that is no library is taken for weights from this size on."""


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


def main() -> None:
    """Print what this process takes after importing a module: `python -m peers.memory MODULE`."""
    import_module(sys.argv[1])
    print(json.dumps(resident([os.getpid()], "")))


if __name__ == "__main__":
    main()
