"""Engines that forked kernels start are copies of one process, which has imported torch and the rest for all of them.

What is said of `process_support/engine_mould.py` holds here, too. There a copy becomes a child of the process that has
asked for it; here those are kernels, which are no ancestors of the process that is copied. So a host stays that one's
child, and a kernel learns from it how the host ended; an engine core is its host's child as ever. Kernels that are no
forks start their engines as people's do (`cold_kernels`).

    python -m notebook_support.copied_engines FD    # the process that is copied, with the socket at which it is asked
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from typing import Any, ClassVar, NoReturn

import setproctitle
from process_support.engine_mould import PID_BYTES, PRELOADED, CopiedProcess, Order, _become

STATUS_BYTES = 4


class KernelsProcess(CopiedProcess):
    """A process that a kernel starts: a copy if it is one of an engine's, or of a server."""

    place: ClassVar[str] = ""
    """The socket at which copies are asked for."""
    _line: socket.socket | None = None
    """This brings the exit status of a copy."""

    def _copy(self, order: Order, descriptors: list[int]) -> int:
        content = os.memfd_create("order")
        line = socket.socket(socket.AF_UNIX)
        try:
            os.write(content, pickle.dumps(order))
            line.connect(self.place)
            socket.send_fds(line, [b"a copy"], [content, *descriptors])
            answer = line.recv(PID_BYTES)
        finally:
            os.close(content)
        assert answer, "the process that is copied has ended"
        self._line = line
        return int.from_bytes(answer)

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._line is None:
            return super()._internal_poll(*arguments, **options)  # type: ignore[misc, no-any-return]
        return self._look(0.0)

    def _wait(self, timeout: float | None) -> int | None:
        if self._line is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        status = self._look(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def _look(self, timeout: float | None) -> int | None:
        assert self._line is not None
        if self.returncode is None:
            # Nothing is taken from the line: another thread may look at the same time.
            poll = select.poll()
            poll.register(self._line, select.POLLIN)
            if poll.poll(None if timeout is None else 1000 * timeout):
                told = self._line.recv(STATUS_BYTES, socket.MSG_PEEK)
                assert told, "the process that is copied has ended"
                self.returncode = int.from_bytes(told, signed=True)
        return self.returncode


def start_copies(place: str) -> None:
    """Have all processes of engines that this process and its forks start copied from now on."""
    KernelsProcess.place = place
    KernelsProcess.surroundings = dict(os.environ)
    subprocess.Popen = KernelsProcess  # type: ignore[misc]


class Source:
    """The process that is copied."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._poll = select.poll()
        self._copies: dict[int, tuple[int, socket.socket]] = {}
        """By pidfd, the pid of each copy and the line to who has asked for it."""

    def make_copies(self) -> None:
        """Make copies until the standard input ends."""
        # A copy begins with the signals held back that its order says.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for descriptor in (self._listening.fileno(), sys.stdin.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in ready:
                if descriptor in self._copies:
                    self._tell_end(descriptor)
            if self._listening.fileno() in ready:
                self._copy()
            elif sys.stdin.fileno() in ready:
                return

    def _copy(self) -> None:
        line, _ = self._listening.accept()
        _, (content, *descriptors), _, _ = socket.recv_fds(line, 64, 64)
        pid = os.fork()
        if not pid:
            _begin(content, descriptors)
        for descriptor in (content, *descriptors):
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self._copies[pidfd] = (pid, line)
        self._poll.register(pidfd, select.POLLIN)
        with contextlib.suppress(OSError):
            line.sendall(pid.to_bytes(PID_BYTES))

    def _tell_end(self, pidfd: int) -> None:
        """Tell how a copy has ended, while there is still something of it."""
        pid, line = self._copies.pop(pidfd)
        self._poll.unregister(pidfd)
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert end is not None
        status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        # A kernel that is gone needs to know nothing.
        with line, contextlib.suppress(OSError):
            line.sendall(status.to_bytes(STATUS_BYTES, signed=True))
        os.waitpid(pid, 0)
        os.close(pidfd)


def _begin(content: int, descriptors: list[int]) -> NoReturn:
    size = os.fstat(content).st_size
    _become(pickle.loads(os.pread(content, size, 0)), descriptors)


def main() -> None:
    """Import what engines import, and be copied."""
    # At its first call this looks for the command line where the environment begins, which copies replace.
    setproctitle.setproctitle("mould of kernels' engines")
    for module in (*PRELOADED, "notebook_support.paced_executor"):
        importlib.import_module(module)
    # The copies run that of the engine as a program of their own.
    del sys.modules["nbengine.engine.__main__"]
    gc.freeze()
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        Source(listening).make_copies()


if __name__ == "__main__":
    main()
