"""A provisioner with which everything that starts kernels by jupyter_client has them forked."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.provisioning import LocalProvisioner
from notebook_support.warm_kernels import (
    ENGINES_VARIABLE,
    LAUNCHER,
    PROVISIONER_VARIABLE,
    SOCKET_VARIABLE,
    ask_for_kernel,
)

NAME = "forked"
ENTRY_POINTS = f"""\
[jupyter_client.kernel_provisioners]
{NAME} = notebook_support.warm_provisioner:ForkedProvisioner
"""


@contextmanager
def warm_kernels(directory: Path, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Begin the process that forks kernels, and the one of which their engines are copies; yields the variables for an
    environment whose kernels are forks.

    The first kernel, and the first engine, wait until the process has imported everything.
    """
    path = directory / "provisioner"
    metadata = path / "forked_kernels-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: forked-kernels\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    variables = {
        SOCKET_VARIABLE: str(directory / "kernels.sock"),
        ENGINES_VARIABLE: str(directory / "engines.sock"),
        PROVISIONER_VARIABLE: NAME,
        "PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(path))),
    }
    sys.path.append(str(path))
    try:
        with (
            _listening(
                "notebook_support.copied_engines", variables[ENGINES_VARIABLE], environment | variables
            ),
            _listening("notebook_support.warm_kernels", variables[SOCKET_VARIABLE], environment | variables),
        ):
            yield variables
    finally:
        sys.path.remove(str(path))


@contextmanager
def _listening(module: str, place: str, environment: dict[str, str]) -> Iterator[None]:
    """Run a program that is asked at a socket, and ends with its standard input."""
    # Only that process has the socket open: when it is gone, the next to ask is told so.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(place)
        listening.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(listening.fileno())],
            env=environment,
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
            # An interrupt from the keyboard is for the tests alone.
            start_new_session=True,
        )
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@contextmanager
def cold_kernels(environment: dict[str, str]) -> Iterator[None]:
    """Let kernels with this environment, and their engines, start as people's do, also those of a server that runs
    already."""
    note = _cold_note(environment[SOCKET_VARIABLE])
    note.touch()
    yield
    note.unlink()


def _cold_note(place: str) -> Path:
    return Path(f"{place}.cold")


class Fork:
    """A forked kernel's process, as `subprocess.Popen` is another's."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd

    def poll(self) -> int | None:
        """Tell whether it has ended: 0, or None."""
        return self._look(0)

    def wait(self) -> int | None:
        """Wait for its end."""
        return self._look(None)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if poll.poll(timeout):
                os.close(self._pidfd)
                self.returncode = 0
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is still there."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """End it."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class ForkedProvisioner(LocalProvisioner):
    """Forks kernels where that can be had, and else starts them."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Launch a kernel with a command."""
        environment = kwargs["env"]
        place = environment.get(SOCKET_VARIABLE)
        if cmd[:3] != [sys.executable, *LAUNCHER] or place is None or _cold_note(place).exists():
            return await super().launch_kernel(cmd, **kwargs)
        outputs = [kwargs.get(name) for name in ("stdout", "stderr")]
        descriptors = [
            standard if output is None else output if isinstance(output, int) else output.fileno()
            for standard, output in zip((1, 2), outputs, strict=True)
        ]
        directory = os.fspath(kwargs.get("cwd") or Path.cwd())
        self.process = Fork(*ask_for_kernel(place, cmd[3:], environment, directory, tuple(descriptors)))
        # It leads a group of its own, and may not do so yet.
        self.pid = self.pgid = self.process.pid
        self.cwd = directory
        return self.connection_info
