"""Many callers at once: those who leave, who do not read, and who send nonsense; the others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import psutil
import pytest
from process_support.engine_under_test import wait_for

Serve = Callable[..., Any]
MEGABYTE = 1 << 20


def body(first: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": first, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def whole(served: Any, first: str, max_tokens: int) -> str:
    text: str = (
        served.http().post("/v1/completions", json=body(first, max_tokens)).json()["choices"][0]["text"]
    )
    return text


async def read_stream(http: httpx2.AsyncClient, first: str, max_tokens: int, leave_after: int | None) -> str:
    """The text of a stream; with `leave_after`, the connection is closed after that number of events."""
    text, events = "", 0
    async with http.stream("POST", "/v1/completions", json=body(first, max_tokens, stream=True)) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            events += 1
            text += httpx2.Response(200, content=line[6:]).json()["choices"][0]["text"]
            if events == leave_after:
                break
    return text


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_third_of_200_streams_leaves_and_every_other_answer_is_whole(serve: Serve) -> None:
    served = serve(knobs={"step_seconds": 0.005}, settings={"max_concurrent_requests": 150})
    first_letters = "abcdefgh"
    expected = {first: await asyncio.to_thread(whole, served, first, 40) for first in first_letters}
    draw = random.Random(7)
    limits = httpx2.Limits(max_connections=300, max_keepalive_connections=0)
    base = served.record.url
    descriptors = served.process.num_fds()
    async with httpx2.AsyncClient(base_url=base, limits=limits, timeout=200) as http:
        leaving = [draw.randint(1, 20) if number % 3 == 0 else None for number in range(200)]
        firsts = [draw.choice(first_letters) for _ in range(200)]
        texts = await asyncio.gather(
            *(read_stream(http, first, 40, after) for first, after in zip(firsts, leaving, strict=True))
        )
    for text, first, after in zip(texts, firsts, leaving, strict=True):
        if after is None:
            assert text == expected[first]
        else:
            assert expected[first].startswith(text)
    served.idle()
    wait_for(lambda: served.process.num_fds() <= descriptors + 2, "the connections to be closed")


def send_and_read_nothing(served: Any, path: str, content: dict[str, Any]) -> socket.socket:
    host, port = served.record.url.removeprefix("http://").split(":")
    request = httpx2.Request("POST", f"{served.record.url}{path}", json=content)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.connect((host, int(port)))
    silent.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return silent


@pytest.fixture(scope="module")
def shared_server(start_shared_server: Serve) -> Any:
    """An engine whose server does not wait long for those who say or read nothing."""
    return start_shared_server(settings={"read_timeout": 2.0, "write_timeout": 1.0})


def link_of(descriptor: str) -> str | None:
    """Return what a descriptor of a process, in /proc, leads to; None if it is closed."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return None


@pytest.mark.timeout(300)
def test_a_reader_that_reads_nothing_is_given_up_and_others_go_on(served: Any) -> None:
    # An answer that no buffer of the system holds: the server has to keep it.
    large = send_and_read_nothing(served, "/detokenize", {"tokens": [68] * 1_000_000})
    stream = send_and_read_nothing(served, "/v1/completions", body("a", 2000, stream=True))
    try:
        for _ in range(3):
            assert whole(served, "a", 5) == "bcdef"
        served.idle()
        port = large.getsockname()[1]
        # It was accepted before those that have been answered. To list all of them again and again would take a processor.
        found = [
            one.fd
            for one in served.process.net_connections(kind="tcp")
            if one.raddr and one.raddr.port == port
        ]
        if found:
            descriptor = f"/proc/{served.record.pid}/fd/{found[0]}"
            link = link_of(descriptor)
            wait_for(lambda: link_of(descriptor) != link, "the connection to be given up", deadline=60)
        assert whole(served, "a", 5) == "bcdef"
    finally:
        large.close()
        stream.close()


@pytest.mark.timeout(300)
async def test_bad_requests_disturb_nobody_and_take_no_memory(serve: Serve) -> None:
    served = serve(knobs={"step_seconds": 0.01})
    large = b'{"prompt": "' + b"x" * (10 * MEGABYTE) + b'"}'
    bad: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"content": b"{"}),
        ("/v1/completions", {"content": b'{"prompt": "\xff"}'}),
        ("/v1/completions", {"content": b'{"prompt": ' + b"[" * 100_000}),
        ("/v1/chat/completions", {"json": {"messages": [{"role": "nobody"}]}}),
        ("/v1/chat/completions", {"json": {"messages": [], "zzz": 1}}),
        ("/v1/nothing", {"json": {}}),
    ]
    headers = {"content-type": "application/json"}
    process = psutil.Process(served.record.pid)
    async with httpx2.AsyncClient(base_url=served.record.url, timeout=200, headers=headers) as http:
        await http.post("/v1/completions", content=large)
        before = process.memory_info().rss
        stream = asyncio.create_task(read_stream(http, "a", 150, None))

        async def send_all(count: int) -> set[int]:
            statuses = set()
            for number in range(count):
                path, options = bad[number % len(bad)]
                statuses.add((await http.post(path, **options)).status_code)
            return statuses

        found = await asyncio.gather(*(send_all(60) for _ in range(10)))
        assert set.union(*found) == {400, 404}
        sizes = [(await http.post("/v1/completions", content=large)).status_code for _ in range(5)]
        assert set(sizes) == {413}
        text = await stream
    assert text == await asyncio.to_thread(whole, served, "a", 150)
    assert process.memory_info().rss - before < 100 * MEGABYTE


@pytest.mark.timeout(300)
def test_half_open_connections_are_closed(served: Any) -> None:
    host, port = served.record.url.removeprefix("http://").split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(20)]
    try:
        for connection in silent[10:]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-")
        assert whole(served, "a", 5) == "bcdef"
        for connection in silent:
            connection.settimeout(30)
            # The server has closed it: nothing comes, or a reset.
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    finally:
        for connection in silent:
            connection.close()
