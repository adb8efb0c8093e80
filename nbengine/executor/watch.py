"""The watch over workers: the messages on their lines, and their ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from nbengine.cluster.worker import RemoteWorker
from nbengine.distributed.layout import RankLayout
from nbengine.executor.failures import WorkerFailure, WorkerReport
from nbengine.ipc.control_messages import Progress
from nbengine.ipc.queues.message_queue import Handle
from nbengine.runtime.processes import RunningProcess, WorkerProcess

LAST_BREATH = 1.0
"""Seconds that a process may take to end once its end of the line has."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """The message that a worker has loaded the model and takes calls."""

    response_handle: Handle
    """The handle of the queue with its answers."""
    async_scheduling: bool


@dataclass(slots=True)
class Watched:
    """A worker process and its place."""

    layout: RankLayout
    process: RunningProcess
    connection: Connection[Any, Any]
    pidfd: int | None = None
    """A descriptor that is readable when the process has ended,
    even if one that it has forked holds the line open."""

    @classmethod
    def of(cls, layout: RankLayout, worker: WorkerProcess) -> Watched:
        """Make the watched form of a worker that has just been started."""
        return cls(layout, worker.process, worker.connection, _pidfd(worker.process.pid))

    def close(self) -> None:
        """Let go of the line; a process that still runs ends then."""
        self.connection.close()
        if self.pidfd is not None:
            os.close(self.pidfd)


Message = Progress | WorkerReady | WorkerFailure


class WorkerWatch:
    """A wait for messages of workers. It is for one thread at a time, except `wake`."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._wake_reader, self._wake_writer = os.pipe()

    def add(self, worker: Watched) -> None:
        """Watch one more worker from now on."""
        self._watched.append(worker)

    def wait(self, timeout: float | None) -> list[tuple[RankLayout, Message]]:
        """Wait for messages and return them in the order of the ranks;
        none when the time is up or `wake` was called."""
        sources: list[Connection[Any, Any] | int] = [self._wake_reader]
        for worker in self._watched:
            sources.append(worker.connection)
            if worker.pidfd is not None:
                sources.append(worker.pidfd)
        ready = set(wait(sources, timeout))
        heard: list[tuple[RankLayout, Message]] = []
        # `_read` removes workers that have ended from the list.
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
        """Return all that a worker has said; its own report, or else its exit status, is the last."""
        messages: list[Message] = []
        with contextlib.suppress(EOFError, OSError):
            while worker.connection.poll():
                message = worker.connection.recv()
                if isinstance(message, WorkerReport):
                    message = WorkerFailure(worker.layout, worker.process.pid, message)
                    # After its own report the exit status says nothing new.
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
        # Without its line, no message of it can come any more.
        process.kill()
        return process.wait()


def _pidfd(pid: int) -> int | None:
    if hasattr(os, "pidfd_open"):
        # Old kernels and some sandboxes refuse it.
        with contextlib.suppress(OSError):
            return os.pidfd_open(pid)
    return None
