"""The resources of this machine: CPUs, GPUs, memory and processes. This module needs no torch."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from nbengine.config import ParallelConfig
from nbengine.runtime.cgroup import ControlGroup, usable_cpus

PROCESSES_PER_CPU = 32
"""Processes that one engine may have for each CPU. Several engine cores on one CPU are slow,
but good to study."""
TASKS_PER_PROCESS = 8
"""Threads that each process of an engine is taken to have: a limit on processes counts threads. A tiny
model's engine core has 7."""
LEAST_STARTING = 2
"""Engine cores that may start at a time even on one CPU: one that reads a file leaves the CPU to another."""
REMOTE_STARTING = 64
"""Engine cores on a cluster that may start at a time: they do not use this machine's CPUs."""
_GPU_SIGNS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_MEMORY = Path("/proc/meminfo")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class Capacity:
    """The resources of a machine.

    `memory` is the free memory in bytes, `num_tasks` the number of processes and threads that may still be
    started, None without a limit. `num_gpus` is None where only a program that uses GPUs could tell.
    """

    num_cpus: int
    memory: int
    num_tasks: int | None = None
    num_gpus: int | None = 0

    @classmethod
    def here(cls) -> Capacity:
        """Measure this machine, as it is now and for this process."""
        limits = [limit for limit in (ControlGroup().task_headroom(), _user_headroom()) if limit is not None]
        return cls(usable_cpus(), available_host_memory(), min(limits, default=None), _count_gpus())

    def process_limit(self) -> tuple[int, str]:
        """Return the number of processes that an engine may have here, and the reason for it."""
        by_cpu = PROCESSES_PER_CPU * self.num_cpus
        if self.num_tasks is not None and self.num_tasks // TASKS_PER_PROCESS < by_cpu:
            return self.num_tasks // TASKS_PER_PROCESS, (
                f"{self.num_tasks} more processes and threads may be started here (ulimit -u, control group), and each "
                f"process of an engine takes about {TASKS_PER_PROCESS}"
            )
        cpus = "1 CPU" if self.num_cpus == 1 else f"{self.num_cpus} CPUs"
        return by_cpu, f"an engine may have {by_cpu} processes on {cpus}, {PROCESSES_PER_CPU} for each"


def available_host_memory() -> int:
    """Return the bytes that this process can still take: the free memory, or less inside a container.

    Files that some process has mapped, such as an engine's weights, are in use: it would read them from the
    disk again and again.
    """
    free = max(0, int(psutil.virtual_memory().available) - _mapped_file_bytes())
    headroom = ControlGroup().memory_headroom()
    return free if headroom is None else min(free, headroom)


def max_starting(parallel: ParallelConfig) -> int:
    """Return the number of engine cores that may start at a time:
    each keeps a CPU busy until it has loaded the model."""
    if parallel.data_parallel_backend == "ray":
        return REMOTE_STARTING
    return max(LEAST_STARTING, usable_cpus())


def _mapped_file_bytes() -> int:
    """Count the bytes of files that processes have mapped. The system calls them available: it could drop
    them."""
    found = {"Mapped:": 0, "Shmem:": 0}
    try:
        with _MEMORY.open() as lines:
            for line in lines:
                name, *rest = line.split()
                if name in found:
                    found[name] = int(rest[0]) << 10
    except OSError:
        return 0  # Linux has it
    # Shared memory may be mapped as well, and is not called available.
    return max(0, found["Mapped:"] - found["Shmem:"])


def _user_headroom() -> int | None:
    """Count the processes and threads that this user may still start; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # The limit does not hold for root.
    if soft == resource.RLIM_INFINITY or os.geteuid() == 0 or not os.path.isdir("/proc/self/task"):
        return None
    used = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            if entry.stat().st_uid == os.geteuid():
                used += len(os.listdir(f"{entry.path}/task"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # It has ended meanwhile, or this user may not look into it.
            continue
    return max(0, soft - used)


def _count_gpus() -> int | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ignores the entries after one that names no GPU; parts of a GPU count like GPUs.
        names = [name.strip() for name in visible.split(",")]
        return next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    if not any(map(os.path.exists, _GPU_SIGNS)):
        return 0
    return len(list(_NVIDIA_GPUS.iterdir())) or None if _NVIDIA_GPUS.is_dir() else None
