"""Ports that nobody else gets meanwhile."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """A port of this machine that is given to nobody who asks for any, and that a server may listen on."""
    with socket.socket() as holder:
        # Linux lets others, who set this too, have a port that is bound and not listened on, but by its number alone.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield holder.getsockname()[1]
