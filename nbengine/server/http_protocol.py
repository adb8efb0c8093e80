"""HTTP as this server speaks it: uvicorn's protocol with h11, whose streams cost less."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""The most bytes of a request's first line and headers."""
WRITE_PART = "write_part"
"""The name in a request's state of what writes a part of its stream without waiting, where that is possible."""
_CHUNK = b"%x\r\n%b\r\n"


class StreamedConnection(h11.Connection):
    """The state of a connection, which frames the parts of a stream by itself: they change nothing in it, and all that
    h11 does to find that out is paid for every token of every stream."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.sends_chunks = False
        """The parts of the answer that is being sent are framed as chunks."""
        self.held = b""
        """A part that has not been written yet."""

    def send(self, event: Any) -> Any:
        """Return the bytes of an event behind those that are held, None for the end of the connection, as h11 does."""
        output = self._framed(event)
        if self.held and output is not None:
            output, self.held = self.held + output, b""
        return output

    def _framed(self, event: Any) -> Any:
        kind = type(event)
        if kind is h11.Data and self.sends_chunks:
            return _CHUNK % (len(event.data), event.data) if event.data else b""
        # Should h11 refuse the event, it refuses what follows, too.
        self.sends_chunks = False
        output = super().send(event)
        self.sends_chunks = kind is h11.Response and b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output


class HttpProtocol(H11Protocol):  # type: ignore[misc]
    """A connection of uvicorn's.

    The other protocol of uvicorn's, with httptools, would be taken by itself where that package is installed. It has
    no limit for headers, and loses the bodies of clients that offer to go on with HTTP/2, as Java's does.
    """

    def __init__(self, *, app_state: dict[str, Any], **options: Any) -> None:
        # Each request's state begins as a copy of it.
        super().__init__(app_state={**app_state, WRITE_PART: self.write_part}, **options)
        self.conn = StreamedConnection()
        self._max_connections: int | None = options["config"].limit_concurrency
        # uvicorn would answer the requests of all connections with an error of its own as long as there are too many.
        self.limit_concurrency = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Close a connection that is one too many; those that are open go on."""
        if self._max_connections is not None and len(self.connections) >= self._max_connections:
            self.transport = transport
            transport.close()
            logger.warning("a connection was closed at once: %d are open", len(self.connections))
            return
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the last request, which refers to this object: without a cycle it goes without the collector."""
        super().connection_lost(exc)
        self.conn.held = b""
        self.app_state.pop(WRITE_PART)
        if self.scope is not None:
            self.scope["state"].pop(WRITE_PART)

    def write_part(self, data: bytes) -> bool:
        """Write a part of the answer that is being sent, and return True; or return False where ASGI's `send` has to be
        asked: the reader is behind or has gone, or does not understand chunks.

        The first part of a turn of the loop is written behind the turn, with those of other connections.
        """
        conn = self.conn
        if self.flow.write_paused or not conn.sends_chunks or self.cycle.disconnected:
            return False
        part = _CHUNK % (len(data), data)
        if conn.held:
            held, conn.held = conn.held, b""
            self.transport.write(held + part)
            return True
        conn.held = part
        holding = _holding.get(self.loop)
        if holding is None:
            holding = _holding[self.loop] = []
            self.loop.call_soon(_write_held, self.loop)
        holding.append(self)
        return True


_holding: dict[asyncio.AbstractEventLoop, list[HttpProtocol]] = {}
"""The connections of each loop that hold parts in this turn.

Each write fills the processor's caches with the operating system's code: the events of all streams cost less where they
are made before the first one is written.
"""


def _write_held(loop: asyncio.AbstractEventLoop) -> None:
    for protocol in _holding.pop(loop):
        held, protocol.conn.held = protocol.conn.held, b""
        if held:
            protocol.transport.write(held)
