"""The keys with which an engine's connections over a network are encrypted and both ends authenticated.

CurveZMQ (RFC 26): each end has a pair of keys; the end that connects must know the public key of the end that
listens, and shows its own. All servers of an engine have one pair and all its clients another, so that only
processes that were given them can listen or connect.
"""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

from nbengine.errors import NBEngineError

SocketOptions = dict[int, int | bytes]
"""The values of socket options, by `zmq.SocketOption`."""

ZAP_DOMAIN = b"nbengine"


class CurveKeys(msgspec.Struct, frozen=True):
    """Keys as Z85 text (RFC 32). They are shown nowhere: not in a log, not by `repr`.

    A process without `server_secret` cannot listen, only connect.
    """

    server_public: str
    client_public: str
    client_secret: str
    server_secret: str = ""

    def __repr__(self) -> str:
        return "CurveKeys(...)"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        # The one of `msgspec.Struct` shows every field.
        return []

    def for_clients(self) -> CurveKeys:
        """Return the keys without the one that only a listening process needs."""
        return msgspec.structs.replace(self, server_secret="")


def make_curve_keys() -> CurveKeys:
    """Make new keys for one engine or queue.

    Raises:
        NBEngineError: this ZeroMQ was built without CURVE.
    """
    if not zmq.has("curve"):
        raise NBEngineError("other machines need a ZeroMQ with CURVE; this one was built without it")
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return CurveKeys(*(key.decode() for key in (server_public, client_public, client_secret, server_secret)))


def server_options(keys: CurveKeys) -> SocketOptions:
    """Return the options of a socket that listens.

    Without a `Gatekeeper` in its context it lets nobody in.
    """
    return {
        zmq.CURVE_SERVER: 1,
        zmq.CURVE_SECRETKEY: keys.server_secret.encode(),
        zmq.ZAP_DOMAIN: ZAP_DOMAIN,
        zmq.ZAP_ENFORCE_DOMAIN: 1,
    }


def client_options(keys: CurveKeys) -> SocketOptions:
    """Return the options of a socket that connects."""
    return {
        zmq.CURVE_SERVERKEY: keys.server_public.encode(),
        zmq.CURVE_PUBLICKEY: keys.client_public.encode(),
        zmq.CURVE_SECRETKEY: keys.client_secret.encode(),
    }
