"""The two kinds of an engine's sockets: files of one machine,
and TCP ports with CURVE that other machines can reach.

`make_socket` (`nbengine/ipc/sockets.py`) makes both kinds; the address says which.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket

import psutil
import zmq

from nbengine.errors import NBEngineError
from nbengine.ipc.curve import CurveKeys, SocketOptions, client_options, server_options
from nbengine.ipc.gatekeeper import Gatekeeper

TCP_PREFIX = "tcp://"
DEFAULT_PATIENCE = 30.0
"""Seconds for which a peer may be out of reach, by default."""
HEARTBEATS_PER_PATIENCE = 6
"""A connection ends when half of them are missed; the other half of the time is for making another."""
SHORTEST_HEARTBEAT_MS = 100
HANDSHAKE_MS = 5000
"""Milliseconds for which a peer may be connected before it shows a key."""
CONNECT_MS = 5000
"""Milliseconds that an attempt to connect may take before the next one."""
BACKLOG = 1024
"""Connections that may wait to be accepted: with fewer, strangers would keep others waiting for seconds."""
LONGEST_RECONNECT_MS = 2000
_FAR_AWAY = "192.0.2.1"
"""An address that no machine has (RFC 5737), to ask the kernel which way leads out of this machine."""
_ANY_PORT = 9
"""The discard port: nothing is sent, but the kernel wants a port to choose a route."""

_TCP_OPTIONS: SocketOptions = {
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.CONNECT_TIMEOUT: CONNECT_MS,
    zmq.RECONNECT_IVL_MAX: LONGEST_RECONNECT_MS,
}


class EngineContext(zmq.Context[zmq.Socket[bytes]]):
    """A context whose TCP sockets have the engine's keys; without keys it makes none.

    A peer that connects to a listening socket is asked for the engine's client key, on a thread that starts
    with the first such socket.
    """

    # Declared here: pyzmq takes attributes that the class does not have for options of sockets.
    _keys: CurveKeys | None = None
    _gatekeeper: Gatekeeper | None = None
    _heartbeat_ms: int = 0

    @classmethod
    def with_keys(cls, keys: CurveKeys | None, patience: float = DEFAULT_PATIENCE) -> EngineContext:
        """Make a new context; `keys` is None for an engine of one machine.

        A connection over a network that is silent for half of `patience` seconds ends.

        Raises:
            NBEngineError: no descriptors are left for it.
        """
        try:
            context = cls()
        except zmq.ZMQError as error:
            raise NBEngineError(f"no sockets can be made: {error}") from error
        context._keys = keys
        context._heartbeat_ms = max(SHORTEST_HEARTBEAT_MS, int(patience * 1000 / HEARTBEATS_PER_PATIENCE))
        return context

    def tcp_options(self, address: str, *, bind: bool) -> SocketOptions:
        """Return the options of a socket that is to listen (`bind`) on a TCP address or to connect to it.

        Raises:
            NBEngineError: this context has no key for it.
        """
        keys = self._keys
        if keys is None or (bind and not keys.server_secret):
            raise NBEngineError("a socket on a network needs the engine's keys, and this process has none")
        silence = HEARTBEATS_PER_PATIENCE // 2 * self._heartbeat_ms
        options = _TCP_OPTIONS | {
            zmq.IPV6: int("[" in address),
            zmq.HEARTBEAT_IVL: self._heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: silence,
        }
        if not bind:
            return options | client_options(keys)
        if self._gatekeeper is None:
            self._gatekeeper = Gatekeeper(self, keys)
            self._gatekeeper.start()
        return options | {zmq.BACKLOG: BACKLOG} | server_options(keys)

    def bind(self, socket: zmq.Socket[bytes], address: str) -> None:
        """Bind a socket that has `tcp_options` to its address."""
        if self._gatekeeper is None:
            raise NBEngineError("a socket that listens on a network needs a gatekeeper")
        self._gatekeeper.bind(socket, address)

    def term(self) -> None:
        """Close the context; all its sockets must be closed."""
        super().term()
        if self._gatekeeper is not None:
            self._gatekeeper.join()
            self._gatekeeper = None


def is_tcp(address: str) -> bool:
    """Return whether a ZMQ address is on a network."""
    return address.startswith(TCP_PREFIX)


def any_port(host: str) -> str:
    """Return the ZMQ address to bind for a port that the kernel chooses;
    `host` is a name or an address of this machine.

    Raises:
        NBEngineError: the name means nothing.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise NBEngineError(f"no address for {host!r}: {error}") from error
    number = str(found[0][4][0])
    return f"{TCP_PREFIX}[{number}]:*" if ":" in number else f"{TCP_PREFIX}{number}:*"


def bound_address(bound: zmq.Socket[bytes]) -> str:
    """Return the address that others connect to, with the port that was chosen."""
    return bound.get_string(zmq.LAST_ENDPOINT)


def host_of(address: str) -> str:
    """Return the host in a `tcp://` address."""
    return address.removeprefix(TCP_PREFIX).rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """Return the port in a `tcp://` address."""
    return int(address.rpartition(":")[2])


def own_address(towards: str | None = None) -> str:
    """Find this machine's address on the way to the machine `towards`, or on the way out (None).

    Nothing is sent.

    Raises:
        NBEngineError: this machine has none.
    """
    try:
        kind, _, _, _, place = socket.getaddrinfo(towards or _FAR_AWAY, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket only chooses a route.
            probe.connect(place)
            found: str = probe.getsockname()[0]
    except OSError as error:
        if towards is None:
            return _some_address()
        raise NBEngineError(f"this machine has no route to {towards!r}: {error}") from error
    return found


def _some_address() -> str:
    """Return an address of an interface that is up, for a machine without a way out."""
    states = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        for item in addresses:
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(item.address)
                if address.version == 4 and not (address.is_loopback or address.is_link_local):
                    return str(address)
    raise NBEngineError("this machine has no address on a network; name one with data_parallel_address")
