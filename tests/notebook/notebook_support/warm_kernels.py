"""Kernels that begin as forks of one process, which has imported what every kernel of these tests imports.

A kernel spends three seconds of a processor on that, and the tests start fifty. Apart from their first moments forks are
what other kernels are: each leads a session of its own, is signalled, killed and waited for by its own pid, and ends
through the interpreter's end. Engines that they start are copies of a process, too
(`notebook_support/copied_engines.py`). `JUPYTER_DEFAULT_PROVISIONER_NAME` brings them to whatever starts kernels
(`notebook_support/warm_provisioner.py`); with a `cold` environment kernels start as anywhere else.

    python -m notebook_support.warm_kernels FD    # the process that forks, with the socket at which it is asked
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from typing import Any

SOCKET_VARIABLE = "NBENGINE_WARM_KERNELS"
ENGINES_VARIABLE = "NBENGINE_COPIED_ENGINES"
PROVISIONER_VARIABLE = "JUPYTER_DEFAULT_PROVISIONER_NAME"
LAUNCHER = ["-m", "ipykernel_launcher"]
"""The command of a kernel, behind the interpreter and before its arguments."""
CHUNK = 1 << 16


def cold(environment: dict[str, str]) -> dict[str, str]:
    """Return an environment in which kernels start as people's do."""
    return {
        name: value
        for name, value in environment.items()
        if name not in (SOCKET_VARIABLE, ENGINES_VARIABLE, PROVISIONER_VARIABLE)
    }


def ask_for_kernel(
    path: str, arguments: list[str], environment: dict[str, str], directory: str, outputs: tuple[int, int]
) -> tuple[int, int]:
    """Have a kernel forked; returns its pid and a pidfd of it."""
    order = {"arguments": arguments, "environment": environment, "directory": directory}
    with (
        socket.socket(socket.AF_UNIX) as connection,
        open(os.devnull, "rb") as nothing,
    ):
        connection.connect(path)
        socket.send_fds(connection, [b" "], [nothing.fileno(), *outputs])
        connection.sendall(json.dumps(order).encode())
        connection.shutdown(socket.SHUT_WR)
        reply, descriptors, _, _ = socket.recv_fds(connection, CHUNK, 1)
    assert descriptors, "the process that forks kernels has ended"
    return int(reply), descriptors[0]


def main() -> None:
    """Fork a kernel for each order, until the standard input ends; in a fork, be the kernel."""
    # As ipykernel's launcher does: the folder in which the tests were started is on no kernel's path.
    if sys.path[0] in ("", os.getcwd()):
        del sys.path[0]
    import_what_kernels_import()
    from notebook_support.copied_engines import start_copies

    start_copies(os.environ[ENGINES_VARIABLE])
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, reap)
    with socket.socket(fileno=int(sys.argv[1])) as listening:
        order = wait_for_orders(listening)
    if order is not None:
        be_kernel(**order)


def import_what_kernels_import() -> None:
    """Import the kernel, the extension, and what the extension imports when it first starts an engine."""
    import ipykernel.ipkernel
    import ipykernel.kernelapp  # noqa: F401

    import nbengine.magics.extension  # noqa: F401
    from nbengine.frontend.text.tokenizer import import_early

    import_early()


def reap(*_: object) -> None:
    """Take note of every kernel that has ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def wait_for_orders(listening: socket.socket) -> dict[str, Any] | None:
    """Fork for each order. Returns None at the end of the standard input, and in a fork its order."""
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if listening not in ready:
            return None
        connection, _ = listening.accept()
        with connection:
            written, descriptors, _, _ = socket.recv_fds(connection, CHUNK, 3)
            while more := connection.recv(CHUNK):
                written += more
            # A kernel that ends at once is not reaped before there is a pidfd of it.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                return {**json.loads(written), "descriptors": descriptors}
            pidfd = os.pidfd_open(pid)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            # Who has asked may be gone; the kernel sees that as any kernel does.
            with contextlib.suppress(OSError):
                socket.send_fds(connection, [str(pid).encode()], [pidfd])
            for descriptor in (pidfd, *descriptors):
                os.close(descriptor)


def be_kernel(
    arguments: list[str], environment: dict[str, str], directory: str, descriptors: list[int]
) -> None:
    """Be a kernel that has been started with these arguments."""
    os.setsid()
    for standard, descriptor in enumerate(descriptors):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # It reads the variable when it is imported.
    sys.argv = ["ipykernel_launcher", *arguments, f"--IPKernelApp.parent_handle={os.getppid()}"]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


if __name__ == "__main__":
    main()
