"""The workers' board: a page of memory that the workers write and the engine core reads."""

from __future__ import annotations

import contextlib
import mmap
import secrets
from pathlib import Path

from nbengine.checks import require, require_int
from nbengine.errors import NBEngineError
from nbengine.ipc.control_messages import WorkerPulse
from nbengine.ipc.private import make_shared, map_shared
from nbengine.metrics.stats import WorkerStats

_WORDS = 8
"""The 8-byte words of a row: a cache line, so that workers that write at once do not slow each other down."""
_ROW_BYTES = 8 * _WORDS
_MEMORY, _STEPS, _SECONDS, _TICKS, _WAITS = range(5)
_MAX_WORKERS = 4096


class WorkerRow:
    """One worker's row, which nobody else writes.

    Each value is stored by itself, as one aligned word: a reader sees the old value or the new one, never
    half of each. Two values that it reads may belong to different steps.
    """

    def __init__(self, integers: memoryview[int], floats: memoryview[float]) -> None:
        self._integers = integers
        self._floats = floats
        self._num_steps = 0

    def set_memory(self, num_bytes: int) -> None:
        """Write how much memory the worker holds, in bytes."""
        self._integers[_MEMORY] = num_bytes

    def tick(self, count: int = 1) -> None:
        """Count pieces of work that the worker has done: layers of a step, parts of a load."""
        self._integers[_TICKS] += count

    def set_waiting(self, waits: bool) -> None:
        """Write whether the worker waits for others."""
        self._integers[_WAITS] = waits

    def end_step(self, seconds: float, num_steps: int = 1) -> None:
        """Count a step with tokens, or several that were computed at once, and write how long the worker's part of one
        took; each of several has an equal share."""
        self._num_steps += num_steps
        self._floats[_SECONDS] = seconds / num_steps
        self._integers[_STEPS] = self._num_steps


class WorkerBoard:
    """A page with one row for each worker. It is unmapped when nothing refers to it or to a row any more."""

    def __init__(self, page: mmap.mmap, num_workers: int, path: Path | None = None) -> None:
        """Wrap a page; call `private`, `create` or `attach` instead."""
        self.path = path
        """The file, for `attach`; None if the board has no file."""
        self.num_workers = num_workers
        memory = memoryview(page)
        self._integers = memory.cast("q")
        self._floats = memory.cast("d")

    @classmethod
    def private(cls, num_workers: int) -> WorkerBoard:
        """Make a board for workers in this process.

        Raises:
            InvalidArgumentError: `num_workers` is not from 1 to 4096.
        """
        return cls(mmap.mmap(-1, _size(num_workers)), num_workers)

    @classmethod
    def create(cls, directory: str | Path, num_workers: int, name: str | None = None) -> WorkerBoard:
        """Make a board in a new file (0600) with the name `name` or a random one,
        for workers in other processes.

        Raises:
            InvalidArgumentError: `num_workers` is not from 1 to 4096.
            OSError: the file cannot be made or does not fit.
        """
        size = _size(num_workers)
        path = Path(directory) / (name or f"workers-{secrets.token_hex(16)}")
        return cls(make_shared(path, size), num_workers, path)

    @classmethod
    def attach(cls, path: str | Path, num_workers: int) -> WorkerBoard:
        """Open the board that another process has made.

        Raises:
            InvalidArgumentError: `num_workers` is not from 1 to 4096.
            NBEngineError: the file is gone, or is no board of `num_workers` workers.
        """
        size = _size(num_workers)
        try:
            return cls(map_shared(path, size), num_workers, Path(path))
        except OSError as error:
            raise NBEngineError(f"the workers' board {path} cannot be opened: {error.strerror}") from error

    def row(self, rank: int) -> WorkerRow:
        """Return the row that the worker of this rank writes; its count of steps begins at 0 again.

        Raises:
            InvalidArgumentError: there is no such rank.
        """
        require("rank", rank, 0 <= rank < self.num_workers, f"from 0 to {self.num_workers - 1}")
        words = slice(rank * _WORDS, (rank + 1) * _WORDS)
        return WorkerRow(self._integers[words], self._floats[words])

    def read(self) -> list[WorkerStats]:
        """Return what the workers have written last, by rank."""
        integers, floats = self._integers, self._floats
        return [
            WorkerStats(rank, integers[start + _MEMORY], integers[start + _STEPS], floats[start + _SECONDS])
            for rank, start in enumerate(range(0, self.num_workers * _WORDS, _WORDS))
        ]

    def pulses(self) -> list[WorkerPulse]:
        """Return what the workers have counted, by rank."""
        integers = self._integers
        return [
            WorkerPulse(rank, integers[start + _TICKS], bool(integers[start + _WAITS]))
            for rank, start in enumerate(range(0, self.num_workers * _WORDS, _WORDS))
        ]

    def unlink(self) -> None:
        """Remove the file, once all workers have attached to it; another call does nothing."""
        path, self.path = self.path, None
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()


def _size(num_workers: int) -> int:
    require_int("num_workers", num_workers)
    require("num_workers", num_workers, 1 <= num_workers <= _MAX_WORKERS, f"from 1 to {_MAX_WORKERS}")
    return num_workers * _ROW_BYTES
