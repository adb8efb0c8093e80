"""HTTP as this server speaks it: uvicorn's protocol with h11, whose streams cost less."""

from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 64 << 10
"""The most bytes of a request's first line and headers."""


class StreamedConnection(h11.Connection):
    """The state of a connection, which frames the parts of a stream by itself: they change nothing in it, and all that
    h11 does to find that out is paid for every token of every stream."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self._sends_chunks = False

    def send(self, event: Any) -> Any:
        """Return the bytes of an event, None for the end of the connection, as h11 does."""
        kind = type(event)
        if kind is h11.Data and self._sends_chunks:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data) if event.data else b""
        # Should h11 refuse the event, it refuses what follows, too.
        self._sends_chunks = False
        output = super().send(event)
        self._sends_chunks = kind is h11.Response and b"\r\ntransfer-encoding: chunked\r\n" in output.lower()
        return output


class HttpProtocol(H11Protocol):  # type: ignore[misc]
    """A connection of uvicorn's.

    The other protocol of uvicorn's, with httptools, would be taken by itself where that package is installed. It has
    no limit for headers, and loses the bodies of clients that offer to go on with HTTP/2, as Java's does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StreamedConnection()
