"""Where an engine's sockets are: files of one machine, or TCP ports with CURVE that other machines can reach.

`make_socket` (`nbengine/ipc/sockets.py`) makes both kinds; which one an address says.
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
"""Seconds for which a peer may be out of reach."""
HEARTBEATS_PER_PATIENCE = 6
"""A connection ends when half of them are missed; the other half of the time is for making another."""
SHORTEST_HEARTBEAT_MS = 100
HANDSHAKE_MS = 5000
"""How long somebody may be connected before having shown a key."""
CONNECT_MS = 5000
"""How long an attempt to connect may take before the next one."""
BACKLOG = 1024
"""Connections that may wait to be accepted, so that those of strangers do not keep others waiting for seconds."""
LONGEST_RECONNECT_MS = 2000
_FAR_AWAY = "192.0.2.1"
"""An address of nobody (RFC 5737), to ask the kernel which way leads out of here."""
_ANY_PORT = 9

_TCP_OPTIONS: SocketOptions = {
    zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
    zmq.CONNECT_TIMEOUT: CONNECT_MS,
    zmq.RECONNECT_IVL_MAX: LONGEST_RECONNECT_MS,
}


class EngineContext(zmq.Context[zmq.Socket[bytes]]):
    """A context whose TCP sockets have the engine's keys; without keys it makes none.

    Who connects to one that listens is asked for the engine's client key, on a thread that starts with the first
    such socket.
    """

    # pyzmq takes other attributes for options of sockets.
    _keys: CurveKeys | None = None
    _gatekeeper: Gatekeeper | None = None
    _heartbeat_ms: int = 0

    @classmethod
    def with_keys(cls, keys: CurveKeys | None, patience: float = DEFAULT_PATIENCE) -> EngineContext:
        """A new context; `keys` is None for an engine of one machine.

        A connection over a network that is silent for half of `patience` seconds ends.
        """
        context = cls()
        context._keys = keys
        context._heartbeat_ms = max(SHORTEST_HEARTBEAT_MS, int(patience * 1000 / HEARTBEATS_PER_PATIENCE))
        return context

    def tcp_options(self, address: str, *, bind: bool) -> SocketOptions:
        """Options of a socket that is about to listen (`bind`) on a TCP address or to connect to it.

        Raises:
            NBEngineError: there is no key for it.
        """
        keys = self._keys
        if keys is None or (bind and not keys.server_secret):
            raise NBEngineError("a socket on a network needs the engine's keys, and there are none here")
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

    def term(self) -> None:
        """Close the context; all its sockets must be closed."""
        super().term()
        if self._gatekeeper is not None:
            self._gatekeeper.join()
            self._gatekeeper = None


def is_tcp(address: str) -> bool:
    """Whether a ZMQ address is one on a network."""
    return address.startswith(TCP_PREFIX)


def any_port(host: str) -> str:
    """The ZMQ address to bind for a port of the kernel's choice; `host` is a name or an address of this machine.

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
    """The address that others connect to, with the port that was chosen."""
    return bound.get_string(zmq.LAST_ENDPOINT)


def host_of(address: str) -> str:
    """The host in a `tcp://` address."""
    return address.removeprefix(TCP_PREFIX).rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    """The port in a `tcp://` address."""
    return int(address.rpartition(":")[2])


def own_address(towards: str | None = None) -> str:
    """This machine's address on the way to `towards`, another's or its own, or on the way out (None). Sends nothing.

    Raises:
        NBEngineError: there is none.
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
        raise NBEngineError(f"this machine has no way to {towards!r}: {error}") from error
    return found


def _some_address() -> str:
    """An address of an interface that is up, for a machine without a way out."""
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
