"""The nursery: a process that imports what several workers need, once for all of them, and is forked into each.

It does not compute or start threads, so that its copies are as good as fresh interpreters. The process
that has started it becomes the workers' parent when it ends, as if it had started each of them by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from nbengine.errors import EngineStartError
from nbengine.runtime.directories import EngineDirectories
from nbengine.runtime.imports import import_for_later
from nbengine.runtime.lifeline import Lifeline
from nbengine.runtime.logs import log_tail
from nbengine.runtime.processes import (
    WorkerProcess,
    describe_status,
    end_processes,
    opened_log,
    start_worker,
)

logger = logging.getLogger(__name__)

LAST_BREATH = 10.0
"""Seconds that the nursery may take to end once its end of the line has."""
TAIL_LINES = 15
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True, slots=True)
class NurseryOrder:
    """The order to be a nursery; any other message makes a process a worker."""

    modules: tuple[str, ...]
    children: tuple[tuple[int, int | None], ...]
    """For each worker, the descriptors of its line and its log; None: the nursery's log is its own."""
    own_session: bool
    """Each worker leads a session of its own."""
    directories: EngineDirectories | None
    """The directories to remove when the process that has started the nursery is gone."""


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of this process that another one has forked."""

    def __init__(self, pid: int) -> None:
        self._forked = pid
        super().__init__([])

    def _execute_child(self, *_: object) -> None:
        # This is where Popen would fork.
        self.pid = self._forked
        self._child_created = True


# The process that starts the workers.


@functools.cache
def can_adopt() -> bool:
    """Return whether this process can become the parent of its orphaned descendants, as on Linux."""
    try:
        with _adoption():
            return True
    except (AttributeError, OSError):
        # This is not Linux, or a sandbox refuses it.
        return False


def fork_workers(
    logs: Sequence[str | None],
    modules: tuple[str, ...],
    on_start: Callable[[], None],
    *,
    own_session: bool = False,
    directories: EngineDirectories | None = None,
) -> list[WorkerProcess]:
    """Start a worker for each of `logs`, as `start_worker` does, but have them import `modules` only once.

    This takes as long as the import; `on_start` is called at its beginning. If this process ends meanwhile, the
    nursery removes `directories`.

    Raises:
        EngineStartError: the nursery has ended before it was forked.
        OSError: there is no room for more processes or descriptors.
    """
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in logs]
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(end)
        outputs = [None, *(opened_log(log, stack) for log in logs[1:])]
        children = tuple(zip([theirs.fileno() for theirs, _ in pairs], outputs, strict=True))
        inherited = [number for child in children for number in child if number is not None]
        nursery = start_worker(logs[0], own_session=own_session, inherited=inherited)
        for theirs, _ in pairs:
            theirs.close()
        stack.callback(nursery.connection.close)
        stack.callback(end_processes, [nursery.process], 0.0, 0.0)
        # The end of one that has ended already will be noticed soon.
        with contextlib.suppress(OSError):
            nursery.connection.send(NurseryOrder(modules, children, own_session, directories))
        on_start()
        try:
            pids = _deliver(nursery, len(logs))
        except (EOFError, OSError):
            raise _failure(nursery.process, logs[0]) from None
        return [
            WorkerProcess(ForkedProcess(pid), Connection(ours.detach()))
            for pid, (_, ours) in zip(pids, pairs, strict=True)
        ]


def _deliver(nursery: WorkerProcess, number: int) -> list[int]:
    """Have the nursery forked, and return the pids of its children, which are this process's then.

    Raises:
        EOFError: it has ended before, and its children with it.
    """
    # Until now it has imported.
    nursery.connection.recv()
    pids: dict[int, int] = {}
    with _adoption():
        try:
            nursery.connection.send(None)
            pids.update(_told(nursery))
            end_processes([nursery.process], LAST_BREATH, 0.0)
            if len(pids) < number:
                raise EOFError
        except BaseException:
            end_processes([nursery.process], 0.0, 0.0)
            pids.update(_told(nursery))
            for pid in pids.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            raise
    return [pids[child] for child in range(number)]


def _told(nursery: WorkerProcess) -> Iterator[tuple[int, int]]:
    """Yield the numbers and pids of the nursery's children, most of them twice, until all ends of the line are
    closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield nursery.connection.recv()


def _failure(nursery: subprocess.Popen[bytes], log: str | None) -> EngineStartError:
    end_processes([nursery], LAST_BREATH, 0.0)
    how = describe_status(nursery.wait())
    cause = f"the process that imports for all workers, pid {nursery.pid}, {how}"
    tail = "" if log is None else log_tail(log, TAIL_LINES)
    return EngineStartError(f"at the start, {cause}", tail)


_adopting = threading.Lock()


@contextlib.contextmanager
def _adoption() -> Iterator[None]:
    """Make this process the next parent of descendants that lose theirs within the block."""
    with _adopting:
        before = ctypes.c_int()
        _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
        _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
        try:
            yield
        finally:
            _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


def _prctl(option: int, argument: Any) -> None:
    zero = ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, zero, zero, zero):
        raise OSError(ctypes.get_errno(), "prctl")


# The nursery.


def be_nursery(order: NurseryOrder, connection: Connection[Any, Any], clean_up: Callable[[], None]) -> int:
    """Import the order's modules, then fork a worker for each line and end; each worker returns, with its line.

    A worker begins when its line has a message, and is a child of the nursery's parent then. `clean_up` is called
    if that is gone.
    """
    lifeline = Lifeline(connection.fileno(), clean_up)
    lifeline.start()
    import_for_later(order.modules)
    # Only this thread would go on in the workers.
    lifeline.stop()
    try:
        connection.send(None)
        connection.recv()
        for number, (line, output) in enumerate(order.children):
            pid = os.fork()
            # If one of the two is killed, the other tells.
            connection.send((number, pid or os.getpid()))
            if not pid:
                connection.close()
                _take_place(order, line, output)
                break
        else:
            # What is to be done at exit is the workers' to do.
            os._exit(0)
    except (EOFError, ConnectionError):
        try:
            clean_up()
        finally:
            os._exit(1)
    return line


def _take_place(order: NurseryOrder, line: int, output: int | None) -> None:
    """Become what `start_worker` starts: with a line, an output, and a session of its own if that is ordered.

    Raises:
        EOFError: there is nobody whose worker it could be.
    """
    if order.own_session:
        os.setsid()
    if output is not None:
        for standard in (1, 2):
            os.dup2(output, standard)
    for descriptor in (number for child in order.children for number in child):
        if descriptor not in (line, None):
            os.close(descriptor)
    beginning = select.poll()
    beginning.register(line, select.POLLIN)
    if any(event & select.POLLHUP for _, event in beginning.poll()):
        raise EOFError
