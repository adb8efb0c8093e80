"""The figures that a worker tells of itself: the memory that it holds, and the time that its part of a step
takes."""

from __future__ import annotations

import time

import psutil
import torch

from nbengine.runtime.worker_board import WorkerRow

MEMORY_INTERVAL = 1.0
"""Seconds between two measurements of memory while steps run."""


class WorkerMeter:
    """A meter that writes a worker's row of the board.

    A step is timed where it runs: in `Worker.execute_model` and `Worker.sample_tokens`, without what lies
    between the two calls. With steps in flight on a GPU the calls return before the device has computed them,
    so that the time is that of the worker's thread, not of the device.
    """

    def __init__(self, row: WorkerRow, device: torch.device) -> None:
        self._row = row
        self._device = device
        self._process = psutil.Process()
        self._seconds = 0.0
        self._memory_due = 0.0

    def ran(self, began: float, *, is_over: bool, num_steps: int = 1) -> None:
        """Count a part of a step with tokens that has run since `began` (`time.perf_counter()`); `is_over`:
        it was the last part, of as many steps at once as `num_steps` says."""
        now = time.perf_counter()
        self._seconds += now - began
        if is_over:
            self._row.end_step(self._seconds, num_steps)
            self._seconds = 0.0
            if now >= self._memory_due:
                self.measure_memory()

    def measure_memory(self) -> None:
        """Write what the worker holds now: what torch has allocated on a GPU, else what the process has
        resident."""
        self._memory_due = time.perf_counter() + MEMORY_INTERVAL
        if self._device.type == "cuda":
            self._row.set_memory(torch.cuda.memory_allocated(self._device))
        else:
            self._row.set_memory(self._process.memory_info().rss)
