"""Processes of `rank_process`, all of them copies of one that has imported it: torch takes longer than most tests."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from process_support.engine_under_test import SUPPORT_PATH

PID_BYTES = 4


class Copy:
    """A running copy, which is no child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    @property
    def runs(self) -> bool:
        return not self._has_ended(0)

    def kill(self) -> None:
        """End it, and wait for its end."""
        if self.runs:
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            self._has_ended(None)

    def close(self) -> None:
        """Forget it; it has ended."""
        os.close(self._descriptor)

    def _has_ended(self, timeout: float | None) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout)[0])


class Mould:
    """The process of which copies are made."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", __name__, str(theirs.fileno())],
                env=os.environ | {"PYTHONPATH": SUPPORT_PATH},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._line.close()
        self._process.wait()

    def copy(self, stdin: int, stdout: int, log: Path) -> Copy:
        """Make a copy that has these descriptors, and writes its errors to `log`."""
        with log.open("wb") as stderr:
            socket.send_fds(self._line, [b"a copy"], [stdin, stdout, stderr.fileno()])
        answer = self._line.recv(PID_BYTES)
        assert answer, f"the mould has ended with status {self._process.wait()}"
        return Copy(int.from_bytes(answer))


def make_copies(line: socket.socket) -> None:
    """Make copies until the other end of the line is closed; each of them returns, too."""
    # The system takes away those that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while descriptors := socket.recv_fds(line, 64, 3)[1]:
        pid = os.fork()
        if not pid:
            line.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for standard, descriptor in enumerate(descriptors):
                os.dup2(descriptor, standard)
        for descriptor in descriptors:
            os.close(descriptor)
        if not pid:
            rank_process.main()
            return
        line.sendall(pid.to_bytes(PID_BYTES))


if __name__ == "__main__":
    from process_support import rank_process

    make_copies(socket.socket(fileno=int(sys.argv[1])))
