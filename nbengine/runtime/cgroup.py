"""The limits of the control groups around this process: containers limit memory and CPU time with them.

This module reads both hierarchies: version 2 ("unified") and version 1 (controllers "memory", "cpu" and
"pids"). Where the system has no control groups, or sets no limits, it finds none.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_V1_UNLIMITED = 1 << 60
"""Version 1 states "no limit" as a number just below 2**63."""


class ControlGroup:
    """The control group of this process. The kernel shows it at `root` and `membership`."""

    def __init__(
        self, root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
    ) -> None:
        self._root = root
        self._paths: dict[str, str] = {}
        lines = _read(membership) or ""
        for line in lines.splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                self._paths[controller] = path

    def memory_headroom(self) -> int | None:
        """Return the bytes that the tightest memory limit leaves; None without a limit.

        Page cache that the kernel can drop (`inactive_file`) does not count as used, unless it may be files that
        processes have mapped.
        """
        kinds = ("inactive_file", "file_mapped")
        rooms = [_headroom(d, "memory.max", "memory.current", *kinds) for d in self._directories("")]
        kinds = ("total_inactive_file", "total_mapped_file")
        rooms += [
            _headroom(d, "memory.limit_in_bytes", "memory.usage_in_bytes", *kinds)
            for d in self._directories("memory")
        ]
        return min((room for room in rooms if room is not None), default=None)

    def cpu_limit(self) -> int | None:
        """Return the CPU time that the tightest quota grants, in whole CPUs, at least 1;
        None without a quota."""
        quotas = []
        for directory in self._directories(""):
            quota, _, period = (_read(directory / "cpu.max") or "max").partition(" ")
            quotas.append((quota, period))
        for directory in self._directories("cpu"):
            quota = _read(directory / "cpu.cfs_quota_us") or "-1"
            quotas.append((quota, _read(directory / "cpu.cfs_period_us") or ""))
        limits = [math.ceil(int(q) / int(p)) for q, p in quotas if q not in ("max", "-1") and p]
        return min(limits, default=None)

    def task_headroom(self) -> int | None:
        """Count the processes and threads that the tightest limit still lets start; None without a limit."""
        directories = [*self._directories(""), *self._directories("pids")]
        rooms = [_room(directory, "pids.max", "pids.current") for directory in directories]
        return min((room for room in rooms if room is not None), default=None)

    def _directories(self, controller: str) -> Iterator[Path]:
        """Yield this process's directory in a hierarchy and those around it; some may not be visible."""
        if controller not in self._paths:
            return
        base = self._root / controller
        group = base / self._paths[controller].lstrip("/")
        for directory in (group, *group.parents):
            yield directory
            if directory == base:
                return


def usable_cpus() -> int:
    """Count the CPUs that this process may use: all, those that it is bound to,
    or fewer if a quota says so."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, ControlGroup().cpu_limit() or cpus)


def _room(directory: Path, limit_file: str, usage_file: str) -> int | None:
    limit, usage = _read(directory / limit_file), _read(directory / usage_file)
    if limit is None or usage is None or limit == "max":
        return None
    return max(0, int(limit) - int(usage))


def _headroom(directory: Path, limit_file: str, usage_file: str, droppable: str, mapped: str) -> int | None:
    limit, usage = _read(directory / limit_file), _read(directory / usage_file)
    if limit is None or usage is None or limit == "max" or int(limit) >= _V1_UNLIMITED:
        return None
    found = {droppable: 0, mapped: 0}
    for line in (_read(directory / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in found:
            found[name] = int(value)
    used = int(usage) - max(0, found[droppable] - found[mapped])
    return max(0, int(limit) - used)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
