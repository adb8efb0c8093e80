"""The server of llama-cpp-python, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from peers.engines import PEERS, UNWANTED, MissingPeerError, install_command

START_TIMEOUT = 300.0


def version(python: str) -> str:
    """Return the version that an interpreter has.

    Raises:
        MissingPeerError: it has none, or not what the server needs; the message has the command that installs it.
    """
    code = "import llama_cpp, llama_cpp.server.app; print(llama_cpp.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise MissingPeerError(f"{reason}; to install it: {install_command(PEERS['llama_cpp'], python)}")
    return done.stdout.split()[-1]


@contextlib.contextmanager
def running(python: str, model: Path, threads: int, context: int) -> Iterator[tuple[str, int]]:
    """Start the server for a GGUF file, with its own defaults but for threads and context; yield its address and its pid.

    It answers one request at a time; one that comes does not interrupt the one that it is answering.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_ctx": context,
        "verbose": "false",
        "interrupt_requests": "false",
    }
    command = [python, "-m", "llama_cpp.server"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    environment = {key: value for key, value in os.environ.items() if key not in UNWANTED}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, f"http://127.0.0.1:{port}/v1/models")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if process.poll() is not None:
            raise SystemExit(f"the server of llama-cpp-python has ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=START_TIMEOUT):
                return
        except urllib.error.URLError:
            time.sleep(0.1)
    raise SystemExit(f"the server of llama-cpp-python does not answer after {START_TIMEOUT:g} s")
