"""ZMQ sockets as this project uses them: private, unbounded, and never in the way of an exit."""

from __future__ import annotations

import os

import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc.curve import SocketOptions
from nbengine.ipc.transport import EngineContext, is_tcp

IPC_PREFIX = "ipc://"
MAX_CONTROL_BYTES = 16 << 20
"""Of a frame on a socket that listens for control messages and subscriptions."""
MAX_BULK_BYTES = 1 << 30
"""Of a frame on a socket that listens for outputs and snapshots: it is held in memory before its sender is known."""


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    kind: int,
    *,
    bind: bool,
    identity: bytes | None = None,
    linger: int = 0,
    send_hwm: int = 0,
    receive_hwm: int = 0,
    max_frame_bytes: int = -1,
    options: SocketOptions | None = None,
) -> zmq.Socket[bytes]:
    """Create a socket of `kind` (a `zmq.SocketType`) and bind or connect it.

    The queues are unbounded unless `send_hwm` or `receive_hwm` (messages) say otherwise: a ROUTER silently
    drops what exceeds its bound, and what a client may have outstanding is bounded by its lease. `linger` is
    how many milliseconds `close` leaves for unsent messages. A peer that sends a frame of more than `max_frame_bytes`
    (-1: any) is disconnected. `options` are set before the socket is used. The
    file of a bound `ipc://` socket is its owner's alone; a `tcp://` one takes the keys of its `EngineContext`.

    Raises:
        NBEngineError: the address cannot be bound or connected, or is on a network and there are no keys.
    """
    options = options or {}
    if is_tcp(address):
        if not isinstance(context, EngineContext):
            raise NBEngineError(f"{address!r} is on a network, and this context has no keys")
        options = context.tcp_options(address, bind=bind) | options
    socket = context.socket(kind)
    try:
        socket.linger = linger
        socket.set_hwm(0)
        if send_hwm:
            socket.sndhwm = send_hwm
        if receive_hwm:
            socket.rcvhwm = receive_hwm
        socket.maxmsgsize = max_frame_bytes
        if identity is not None:
            socket.routing_id = identity
        for option, value in options.items():
            socket.set(option, value)
        if bind:
            socket.bind(address)
            _make_private(address)
        else:
            socket.connect(address)
    except (zmq.ZMQError, OSError, ValueError, TypeError) as error:
        socket.close(linger=0)
        raise NBEngineError(f"cannot {'bind' if bind else 'connect'} {address!r}: {error}") from error
    return socket


def _make_private(address: str) -> None:
    # The directory (0700) protects the file until here; a umask would be the whole process's.
    if address.startswith(IPC_PREFIX):
        os.chmod(address.removeprefix(IPC_PREFIX), 0o600)
