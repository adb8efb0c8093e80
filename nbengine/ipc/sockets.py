"""ZMQ sockets as this project uses them: private, unbounded, and never in the way of an exit."""

from __future__ import annotations

import os
from collections.abc import Callable

import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc.curve import SocketOptions
from nbengine.ipc.shortage import check_room
from nbengine.ipc.transport import EngineContext, is_tcp

IPC_PREFIX = "ipc://"
MAX_WORD_BYTES = 1 << 10
"""The most bytes of a frame on a socket that listens for announcements and subscriptions."""
MAX_CLIENT_BYTES = 64 << 10
"""The most bytes of a frame on the socket that listens for the control messages of clients."""
MAX_CONTROL_BYTES = 1 << 20
"""The most bytes of a frame on the socket that listens for the control messages of engine cores."""
MAX_BULK_BYTES = 1 << 30
"""The most bytes of a frame on a socket that listens for outputs and snapshots:
memory holds it before its sender is known."""


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
    prepare: Callable[[zmq.Socket[bytes]], None] | None = None,
) -> zmq.Socket[bytes]:
    """Create a socket of `kind` (a `zmq.SocketType`) and bind or connect it.

    The queues are unbounded unless `send_hwm` or `receive_hwm` (messages) say otherwise: a ROUTER silently
    drops what exceeds its bound, and what a client may have outstanding is bounded by its lease. `linger` is
    the milliseconds that `close` leaves for unsent messages. A peer that sends a frame of more than
    `max_frame_bytes` (-1: any) is disconnected. `options` are set before the socket is used. The file of a
    bound `ipc://` socket is its owner's alone; a `tcp://` one takes the keys of its `EngineContext`.

    Raises:
        NBEngineError: the address cannot be bound or connected, or is on a network and there are no keys.
    """
    options = options or {}
    socket: zmq.Socket[bytes] | None = None
    try:
        check_room()
        if is_tcp(address):
            options = _tcp_options(context, address, bind=bind) | options
        socket = context.socket(kind)
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
        if prepare is not None:
            prepare(socket)
        if bind and isinstance(context, EngineContext) and is_tcp(address):
            context.bind(socket, address)
        elif bind:
            socket.bind(address)
            _make_private(address)
        else:
            socket.connect(address)
    except (zmq.ZMQError, OSError, ValueError, TypeError) as error:
        if socket is not None:
            socket.close(linger=0)
        raise NBEngineError(f"cannot {'bind' if bind else 'connect'} {address!r}: {error}") from error
    return socket


def _tcp_options(context: zmq.Context[zmq.Socket[bytes]], address: str, *, bind: bool) -> SocketOptions:
    if not isinstance(context, EngineContext):
        raise NBEngineError(f"{address!r} is on a network, and this context has no keys")
    return context.tcp_options(address, bind=bind)


def _make_private(address: str) -> None:
    # The directory (0700) protects the file until here; a umask would hold for the whole process.
    if address.startswith(IPC_PREFIX):
        os.chmod(address.removeprefix(IPC_PREFIX), 0o600)
