"""HTTP on a connection: streams are framed as h11 does it, and what clients send beside a request does no harm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from nbengine.server.http_protocol import MAX_HEADER_BYTES, HttpProtocol, StreamedConnection

PARTS = [b"a", b"", b"data: x\n\n", b"y" * 70_000, b"\r\n0\r\n\r\n"]
REQUESTS = [
    b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
]


def said(
    connection: h11.Connection, request: bytes, headers: list[tuple[str, str]], parts: list[bytes]
) -> bytes:
    """The bytes that are sent in answer to a request."""
    connection.receive_data(request)
    while connection.next_event() is not h11.NEED_DATA and connection.their_state is not h11.DONE:
        pass
    output = connection.send(h11.Response(status_code=200, headers=headers))
    for part in parts:
        output += connection.send(h11.Data(data=part))
    return output + connection.send(h11.EndOfMessage())


@pytest.mark.parametrize("request_bytes", REQUESTS)
@pytest.mark.parametrize("length", [None, sum(map(len, PARTS))])
def test_an_answer_is_written_byte_for_byte_as_h11_writes_it(
    request_bytes: bytes, length: int | None
) -> None:
    headers = [] if length is None else [("content-length", str(length))]
    parts = [] if request_bytes.startswith(b"HEAD") else PARTS
    own = said(StreamedConnection(), request_bytes, headers, parts)
    assert own == said(h11.Connection(h11.SERVER), request_bytes, headers, parts)


def test_each_answer_of_a_connection_has_a_framing_of_its_own() -> None:
    own, other = StreamedConnection(), h11.Connection(h11.SERVER)
    for headers in ([], [("content-length", "1")], []):
        outputs = [said(connection, REQUESTS[0], headers, [b"a"]) for connection in (own, other)]
        assert outputs[0] == outputs[1]
        for connection in (own, other):
            connection.start_next_cycle()


def test_nothing_follows_the_end_of_a_stream() -> None:
    own = StreamedConnection()
    said(own, REQUESTS[0], [], [b"a"])
    with pytest.raises(h11.LocalProtocolError):
        own.send(h11.Data(data=b"more"))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def connected() -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Open a connection to a server that sends bodies back."""
    config = uvicorn.Config(echo, http=HttpProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()

    def protocol() -> Any:
        return HttpProtocol(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await server.wait_closed()


async def test_the_body_of_a_client_that_offers_http_2_is_read() -> None:
    async with connected() as (reader, writer):
        head = b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        writer.write(head + b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\nContent-Length: 5\r\n\r\nhello")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.readuntil(b"0\r\n\r\n") == b"5\r\nhello\r\n0\r\n\r\n"


async def test_headers_without_an_end_are_refused_at_their_limit() -> None:
    async with connected() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * (2 * MAX_HEADER_BYTES))
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
