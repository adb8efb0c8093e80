"""The files that a message queue has until its readers have come: a ring and a socket, both with its name."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def new_queue_name() -> str:
    """Make a name that no other queue has."""
    return secrets.token_hex(8)


def ring_path(directory: str | Path, name: str) -> str:
    """Return the path of the ring of a queue."""
    return os.path.join(directory, f"ring-{name}")


def queue_socket_path(socket_directory: str | Path, name: str) -> str:
    """Return the path of the socket of a queue."""
    return os.path.join(socket_directory, f"q-{name}")


def remove_queue_files(directory: str | Path, socket_directory: str | Path, name: str) -> None:
    """Remove the files of a queue whose writer has ended, if it has left them."""
    for path in (ring_path(directory, name), queue_socket_path(socket_directory, name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
