"""The Ray actor on a node: starts a keeper there, and passes messages between it and the bridge.

Ray's own processes import this, and the bridge; nothing else of nbengine does.
"""

from __future__ import annotations

import socket
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray

import nbengine
from nbengine.engine.processes import child_environment, engine_command

RAY_VARIABLES = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_LD_PRELOAD_ON_WORKERS", "RAY_CLIENT_MODE")
"""What Ray sets for its own worker processes, and what their children must not take for their own."""
IN, OUT = "in", "out"
"""Ray's concurrency groups: calls of `send` keep their order, and `receive` waits without being in their way."""
LANES = {IN: 1, OUT: 1}


class NodeActor:
    """Passes messages. The keeper sees the end of this process as the end of a line, and ends with all it keeps."""

    def __init__(self) -> None:
        self._line: Connection[Any, Any] | None = None

    def open(self, version: str, label: str) -> str | None:
        """Start a keeper, unless `version` of nbengine is another than this node's; returns what is wrong then."""
        if nbengine.__version__ != version:
            where = Path(nbengine.__file__).parent
            return f"nbengine {nbengine.__version__} ({where}) is installed there, and {version} here"
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
        """Give the keeper a message; of no effect when it is gone."""
        if self._line is not None:
            try:
                self._line.send_bytes(message)
            except OSError:
                # `receive` says so.
                return

    def receive(self) -> bytes | None:
        """The keeper's next message, None if it is gone."""
        try:
            return None if self._line is None else self._line.recv_bytes()
        except (EOFError, OSError):
            return None
