"""What the control groups around this process leave it: containers limit memory and CPU time through them.

Both hierarchies are read: version 2 ("unified") and version 1 (controllers "memory" and "cpu"). Where there
are no control groups, or no limits, nothing is found.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

_V1_UNLIMITED = 1 << 60
"""Version 1 states "no limit" as a number just below 2**63."""


class ControlGroup:
    """The control group of this process. `root` and `membership` are where the kernel shows it."""

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
        """Bytes left under the tightest memory limit; None without one.

        Page cache that the kernel can drop (`inactive_file`) does not count as used.
        """
        rooms = [_headroom(d, "memory.max", "memory.current", "inactive_file") for d in self._directories("")]
        rooms += [
            _headroom(d, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            for d in self._directories("memory")
        ]
        return min((room for room in rooms if room is not None), default=None)

    def cpu_limit(self) -> int | None:
        """Whole CPUs' worth of time that the tightest quota grants, at least 1; None without one."""
        quotas = []
        for directory in self._directories(""):
            quota, _, period = (_read(directory / "cpu.max") or "max").partition(" ")
            quotas.append((quota, period))
        for directory in self._directories("cpu"):
            quota = _read(directory / "cpu.cfs_quota_us") or "-1"
            quotas.append((quota, _read(directory / "cpu.cfs_period_us") or ""))
        limits = [math.ceil(int(q) / int(p)) for q, p in quotas if q not in ("max", "-1") and p]
        return min(limits, default=None)

    def _directories(self, controller: str) -> Iterator[Path]:
        """This process's directory in a hierarchy and those around it; some may not be visible."""
        if controller not in self._paths:
            return
        base = self._root / controller
        group = base / self._paths[controller].lstrip("/")
        for directory in (group, *group.parents):
            yield directory
            if directory == base:
                return


def _headroom(directory: Path, limit_file: str, usage_file: str, droppable: str) -> int | None:
    limit, usage = _read(directory / limit_file), _read(directory / usage_file)
    if limit is None or usage is None or limit == "max" or int(limit) >= _V1_UNLIMITED:
        return None
    used = int(usage)
    for line in (_read(directory / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == droppable:
            used -= int(value)
    return max(0, int(limit) - used)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
