"""The number of threads with which torch computes on the CPU."""

from __future__ import annotations

import os

import torch

from nbengine.runtime.cgroup import ControlGroup

SINGLE_THREAD_BYTES = 4 << 20
"""Weights up to this size stay in one core's cache, and handing work to other threads costs more than it
gains: a step of random-tiny (0.4 MiB) takes 0.4 ms on one thread, and up to a hundred times that on two when
other processes want the cores."""


class TorchThreads:
    """The number of torch's threads, a setting of the whole process: it is lowered for a model, and put
    back."""

    def __init__(self) -> None:
        self._original: int | None = None

    def limit(self, weights_bytes: int, num_ranks: int = 1) -> None:
        """Lower the number to what pays for weights of this size, and to a container's CPU quota.

        `num_ranks` processes divide the cores among them. A number that the user has chosen (OMP_NUM_THREADS)
        stays.
        """
        if "OMP_NUM_THREADS" in os.environ:
            return
        current = torch.get_num_threads()
        quota = ControlGroup().cpu_limit() or current
        share = max(1, min(current, quota) // num_ranks)
        wanted = 1 if weights_bytes <= SINGLE_THREAD_BYTES else share
        if wanted < current:
            self._original = current
            torch.set_num_threads(wanted)

    def restore(self) -> None:
        """Undo `limit`."""
        if self._original is not None:
            torch.set_num_threads(self._original)
            self._original = None
