"""A small process for work on other people's texts, which could take any time and memory.

The kernel limits what it takes: a question that costs too much ends the process, and the next one starts it
again. It ends with the process that started it, because its input does.
"""

from __future__ import annotations

import logging
import os
import resource
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from nbengine.errors import NBEngineError, RequestError
from nbengine.ipc.liveness import ProcessState
from nbengine.ipc.process_state import what_holds
from nbengine.runtime.processes import child_environment, describe_status
from nbengine.units import size

logger = logging.getLogger(__name__)

_START_SECONDS = 60.0
"""Seconds for the interpreter and its imports, in addition to those of a question."""
_WAIT_FACTOR = 15.0
"""Times its processor time that an answer may take: the machine has other work."""
_LOOK_SECONDS = 0.5
"""Seconds without anything to read or write after which the process is looked at. Two looks in a row that find
it stopped are enough."""
_LENGTH_BYTES = 8
_PIECE_BYTES = 1 << 20


class _StoppedError(Exception):
    """Somebody has stopped the process (SIGSTOP)."""


class LimitedProcess:
    """The other end of a process that runs `serve`, which starts when it is first needed.

    It is for one thread at a time. Another process takes the place of one that has ended or is stopped.
    """

    def __init__(self, module: str, what: str, task: str, max_seconds: float, max_bytes: int) -> None:
        """Build the object without starting the process.

        Args:
            module: runs as `python -m MODULE MAX_SECONDS MAX_BYTES` and calls `serve`.
            what: the thing that the process does, for messages: "checks grammars".
            task: the purpose of a question, for messages: "to compile".
            max_seconds: processor time that a question may take.
            max_bytes: memory, as `serve` limits it.
        """
        self._module = module
        self._what = what
        self._task = task
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    def shutdown(self) -> None:
        """End the process and wait for it."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, question: bytes) -> bytes:
        """Return the answer to a question.

        Raises:
            RequestError: the question takes too long or too much memory.
            NBEngineError: the process cannot be used.
        """
        return self._exchange(question) or self._refuse()

    def _exchange(self, question: bytes) -> bytes:
        """Return the answer to a question, which is never empty, or b"" if the process has ended over it."""
        if os.getpid() != self._owner:
            # A forked copy has the pipes, but the process is its parent's.
            self._process, self._owner = None, os.getpid()
        for _ in range(2):
            process = self._running()
            try:
                return _answer(process, question, _START_SECONDS + _WAIT_FACTOR * self._max_seconds)
            except BrokenPipeError:
                # It was ended while it had nothing to do: the question is not to blame.
                self.shutdown()
            except _StoppedError:
                # Nobody else waits for it, and it has nothing that another one would not have.
                logger.warning(
                    "the process that %s (pid %d) is stopped (SIGSTOP?): another takes its place",
                    self._what,
                    process.pid,
                )
                self.shutdown()
            except TimeoutError:
                self.shutdown()
                raise NBEngineError(f"the process that {self._what} does not answer") from None
            except BaseException:
                # An interrupt: the answer that may still come is not for the next question.
                self.shutdown()
                raise
        raise NBEngineError(f"the process that {self._what} was ended or stopped twice before it answered")

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            safe_path = ["-P"] if sys.flags.safe_path else []
            limits = (str(self._max_seconds), str(self._max_bytes))
            self._process = subprocess.Popen(
                [sys.executable, *safe_path, "-m", self._module, *limits],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=child_environment(),
            )
        return self._process

    def _refuse(self) -> bytes:
        """Raise the error that says why the process has ended."""
        process = self._process
        status = 0 if process is None else process.wait()
        self.shutdown()
        if status == -signal.SIGPROF:
            raise RequestError(f"it takes more than {self._max_seconds:g} s {self._task}; simplify it")
        if status == -signal.SIGABRT:
            raise RequestError(f"it takes more than {size(self._max_bytes)} {self._task}; simplify it")
        raise NBEngineError(f"the process that {self._what} {describe_status(status)}")


def _answer(process: subprocess.Popen[bytes], question: bytes, max_seconds: float) -> bytes:
    """Write a question and return its answer, which is empty when the process ends instead.

    Raises:
        BrokenPipeError: the process had ended before.
        _StoppedError: the process is stopped.
        TimeoutError: it neither answered nor ended within `max_seconds`.
    """
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise NBEngineError(f"process {process.pid} has no pipes")
    deadline = time.monotonic() + max_seconds
    to_write = memoryview(len(question).to_bytes(_LENGTH_BYTES, "little") + question)
    answer = bytearray()
    is_stopped = False
    os.set_blocking(stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(stdin, selectors.EVENT_WRITE)
        selector.register(stdout, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic())))
            if not ready and time.monotonic() >= deadline:
                raise TimeoutError
            was_stopped = is_stopped
            is_stopped = not ready and what_holds(process.pid) is ProcessState.STOPPED
            if was_stopped and is_stopped:
                raise _StoppedError
            for key, _ in ready:
                if key.fileobj is stdin:
                    to_write = to_write[os.write(stdin.fileno(), to_write[:_PIECE_BYTES]) :]
                    if not to_write:
                        selector.unregister(stdin)
                    continue
                piece = os.read(stdout.fileno(), _PIECE_BYTES)
                answer += piece
                if not piece:
                    return b""
                if len(answer) >= _LENGTH_BYTES + int.from_bytes(answer[:_LENGTH_BYTES], "little"):
                    return bytes(answer[_LENGTH_BYTES:])


def serve(
    answer: Callable[[bytes], bytes], max_seconds: float, max_bytes: int, *, beyond_present: bool = False
) -> int:
    """Answer questions from the standard input, within limits, until it ends;
    return the process's exit status.

    `max_seconds` is processor time for one question. `max_bytes` limits the process's address space: all of
    it, or with `beyond_present` the part that it does not have yet.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit = max_bytes + (_address_space() if beyond_present else 0)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = sys.stdin.buffer, sys.stdout.buffer
    while (question := _read(source)) is not None:
        # The signal is not handled: it ends the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        answered = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        target.write(len(answered).to_bytes(_LENGTH_BYTES, "little"))
        target.write(answered)
        target.flush()
    return 0


def _read(source: BinaryIO) -> bytes | None:
    length = source.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    return source.read(int.from_bytes(length, "little"))


def _address_space() -> int:
    """Return the size of this process's address space in bytes; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0
