"""HTTP as this server speaks it: uvicorn's protocol with h11, whose streams cost less."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 64 << 10
"""The most bytes of a request's first line and headers."""


WRITE_PART = "write_part"
"""The name in a request's state of what writes a part of its stream at once, where that is possible."""


_CHUNK = b"%x\r\n%b\r\n"


class StreamedConnection(h11.Connection):
    """The state of a connection, which frames the parts of a stream by itself: they change nothing in it, and all that
    h11 does to find that out is paid for every token of every stream."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.sends_chunks = False
        """The parts of the answer that is being sent are framed as chunks."""

    def send(self, event: Any) -> Any:
        """Return the bytes of an event, None for the end of the connection, as h11 does."""
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

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of the last request, which refers to this object: without a cycle it goes without the collector."""
        super().connection_lost(exc)
        self.app_state.pop(WRITE_PART)
        if self.scope is not None:
            self.scope["state"].pop(WRITE_PART)

    def write_part(self, data: bytes) -> bool:
        """Write a part of the answer that is being sent, and return True; or return False where ASGI's `send` has to be
        asked: the reader is behind or has gone, or does not understand chunks."""
        if self.flow.write_paused or not self.conn.sends_chunks or self.cycle.disconnected:
            return False
        self.transport.write(_CHUNK % (len(data), data))
        return True
