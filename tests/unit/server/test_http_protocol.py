"""HTTP on a connection: streams are framed as h11 does it, and what clients send beside a request does no harm."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import h11
import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from nbengine.server.http_protocol import MAX_HEADER_BYTES, WRITE_PART, HttpProtocol, StreamedConnection

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


async def parts(scope: Scope, receive: Receive, send: Send) -> None:
    """Send parts as streams do: at once where that is possible, and else as ASGI has it."""
    write = scope["state"][WRITE_PART]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    at_once = [write(part) for part in PARTS if part]
    if not all(at_once):
        assert not any(at_once)
        for part in PARTS:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@asynccontextmanager
async def connected(
    app: ASGIApp = echo, made: Callable[[HttpProtocol], object] = id, max_connections: int | None = None
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    """Open a connection to a server of an application; `made` is told of the server's side of it."""
    config = uvicorn.Config(
        app, http=HttpProtocol, ws="none", lifespan="off", log_config=None, limit_concurrency=max_connections
    )
    config.load()
    state = ServerState()

    def protocol() -> Any:
        protocol = HttpProtocol(config=config, server_state=state, app_state={})
        made(protocol)
        return protocol

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


async def test_a_connection_too_many_is_closed_and_the_others_go_on() -> None:
    async with connected(max_connections=1) as (reader, writer):
        for _ in range(2):
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await reader.readuntil(b"0\r\n\r\n")
            further, closing = await asyncio.open_connection(*writer.get_extra_info("peername"))
            assert await asyncio.wait_for(further.read(), 60) == b""
            closing.close()


async def test_headers_without_an_end_are_refused_at_their_limit() -> None:
    async with connected() as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * (2 * MAX_HEADER_BYTES))
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(("request_bytes", "framed"), [(REQUESTS[0], True), (REQUESTS[2], False)])
async def test_parts_that_are_written_at_once_are_framed_as_those_of_asgi(
    request_bytes: bytes, framed: bool
) -> None:
    async with connected(parts) as (reader, writer):
        writer.write(request_bytes)
        await reader.readuntil(b"\r\n\r\n")
        body = b"".join(PARTS)
        if framed:
            frames = [b"%x\r\n%b\r\n" % (len(part), part) for part in PARTS if part]
            body = b"".join(frames) + b"0\r\n\r\n"
        assert await reader.readexactly(len(body)) == body


async def test_a_part_is_written_although_nothing_follows_it() -> None:
    gone = asyncio.Event()

    async def lonely(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        assert scope["state"][WRITE_PART](b"a")
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()

    async with connected(lonely) as (reader, writer):
        writer.write(REQUESTS[0])
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(6) == b"1\r\na\r\n"
        writer.close()
        await asyncio.wait_for(gone.wait(), 60)


async def test_nothing_is_written_at_once_to_a_reader_that_is_behind_or_has_gone() -> None:
    protocols: list[HttpProtocol] = []
    asked = asyncio.Event()
    left = asyncio.Event()
    wrote: list[bool] = []

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        write = scope["state"][WRITE_PART]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while write(b"x" * 65536):
            wrote.append(True)
        asked.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        wrote.append(write(b"x"))
        left.set()

    async with connected(flood, protocols.append) as (_, writer):
        writer.write(REQUESTS[0])
        await asyncio.wait_for(asked.wait(), 60)
        (protocol,) = protocols
        # What the operating system has no room for waits in the transport, and that is little.
        assert 0 < protocol.transport.get_write_buffer_size() < 256 << 10
        assert all(wrote)
        writer.transport.abort()
        await asyncio.wait_for(left.wait(), 60)
    assert wrote[-1] is False


async def test_a_connection_leaves_nothing_for_the_collector_of_cycles() -> None:
    made: list[weakref.ref[HttpProtocol]] = []
    gc.collect()
    gc.disable()
    try:
        async with connected(parts, lambda protocol: made.append(weakref.ref(protocol))) as (reader, writer):
            writer.write(REQUESTS[0].replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            await reader.read()
            writer.close()
            while made[0]() is not None:
                # It goes as soon as the loop has told it of the end.
                await asyncio.sleep(0)
    finally:
        gc.enable()
