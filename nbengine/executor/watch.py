"""What workers say over their lines, and how they end."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from nbengine.cluster.worker import RemoteWorker
from nbengine.distributed.layout import RankLayout
from nbengine.engine.processes import RunningProcess, WorkerProcess
from nbengine.executor.failures import WorkerFailure, WorkerReport
from nbengine.ipc.control_messages import Progress
from nbengine.ipc.message_queue import Handle

LAST_BREATH = 1.0
"""Seconds that a process may take to be gone once its end of the line is."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker takes calls: its first message when it has loaded the model."""

    response_handle: Handle
    """Of the queue with its answers."""
    async_scheduling: bool


@dataclass(slots=True)
class Watched:
    """A worker process and its place."""

    layout: RankLayout
    process: RunningProcess
    connection: Connection[Any, Any]
    pidfd: int | None = None
    """Readable when the process has ended, even if one that it has forked holds the line open."""

    @classmethod
    def of(cls, layout: RankLayout, worker: WorkerProcess) -> Watched:
        """A worker that has just been started."""
        return cls(layout, worker.process, worker.connection, _pidfd(worker.process.pid))

    def close(self) -> None:
        """Let go of the line; the process, if there still is one, ends then."""
        self.connection.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


Message = Progress | WorkerReady | WorkerFailure


class WorkerWatch:
    """Waits for what workers have to say. For one thread at a time, except `wake`."""

    def __init__(self, workers: Iterable[Watched]) -> None:
        self._watched = list(workers)
        self._wake_reader, self._wake_writer = os.pipe()

    def wait(self, timeout: float | None) -> list[tuple[RankLayout, Message]]:
        """What has come, in the order of the ranks; nothing when the time is up or `wake` was called."""
        sources: list[Connection[Any, Any] | int] = [self._wake_reader]
        for worker in self._watched:
            sources.append(worker.connection)
            if worker.pidfd is not None:
                sources.append(worker.pidfd)
        ready = set(wait(sources, timeout))
        heard: list[tuple[RankLayout, Message]] = []
        for worker in list(self._watched):
            if worker.connection in ready or worker.pidfd in ready:
                heard += [(worker.layout, message) for message in self._read(worker)]
        return heard

    def wake(self) -> None:
        """End the wait of another thread, and every later one."""
        os.write(self._wake_writer, b"\0")

    def close(self) -> None:
        """Let go of the workers, which stay the caller's."""
        os.close(self._wake_reader)
        os.close(self._wake_writer)

    def _read(self, worker: Watched) -> list[Message]:
        """All that a worker has said; its own report, or else its exit status, is the last."""
        messages: list[Message] = []
        with contextlib.suppress(EOFError, OSError):
            while worker.connection.poll():
                message = worker.connection.recv()
                if isinstance(message, WorkerReport):
                    message = WorkerFailure(worker.layout, worker.process.pid, message)
                    self._watched.remove(worker)
                    return [*messages, message]
                messages.append(message)
            if worker.pidfd is None or not wait([worker.pidfd], 0):
                return messages
        self._watched.remove(worker)
        status = _status(worker.process)
        how = worker.process.end if isinstance(worker.process, RemoteWorker) else ""
        return [*messages, WorkerFailure(worker.layout, worker.process.pid, status=status, how=how)]


def _status(process: RunningProcess) -> int:
    try:
        return process.wait(LAST_BREATH)
    except subprocess.TimeoutExpired:
        # Without its line it cannot be heard any more.
        process.kill()
        return process.wait()


def _pidfd(pid: int) -> int | None:
    if hasattr(os, "pidfd_open"):
        # Refused by old kernels and by some sandboxes.
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
