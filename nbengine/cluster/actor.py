"""The Ray actor on a node: it starts a keeper there, and passes messages between the keeper and the bridge.

Only Ray's own processes and the bridge import this module; nothing else of nbengine does.
"""

from __future__ import annotations

import socket
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

from nbengine.ipc.protocol import PROTOCOL
from nbengine.runtime.processes import child_environment, engine_command
from nbengine.version import __version__

RAY_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_CLIENT_MODE")
"""Variables that Ray sets for its own worker processes, and that their children must not take for theirs."""
IN, OUT = "in", "out"
"""Names of Ray's concurrency groups: calls of `send` keep their order,
and `receive` waits without blocking them."""
LANES = {IN: 1, OUT: 1}
VERSION = f"{__version__} (protocol {PROTOCOL})"
"""The version of nbengine, which must be the same on all nodes."""


class NodeActor:
    """An actor that passes messages to and from a keeper, which ends when the line to this process does."""

    def __init__(self) -> None:
        self._line: Connection[Any, Any] | None = None

    def open(self, version: str, label: str) -> str | None:
        """Start a keeper; if `version` is not this node's `VERSION` of nbengine,
        start none and return the error."""
        if version != VERSION:
            where = Path(__file__).parents[1]
            return f"nbengine {VERSION} in {where} is installed there, and {version} here"
        node, address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        theirs, ours = socket.socketpair()
        with theirs, ours:
            subprocess.run(
                engine_command("keeper", str(theirs.fileno()), node, address, label),
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in child_environment().items() if name not in RAY_VARIABLES},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                check=True,
            )
            self._line = Connection(ours.detach())
        return None

    def send(self, message: bytes) -> None:
        """Send the keeper a message; this has no effect when it is gone."""
        if self._line is not None:
            try:
                self._line.send_bytes(message)
            except OSError:
                # `receive` tells that the keeper is gone.
                return

    def receive(self) -> bytes | None:
        """Return the keeper's next message, None if it is gone."""
        try:
            return None if self._line is None else self._line.recv_bytes()
        except (EOFError, OSError):
            return None
