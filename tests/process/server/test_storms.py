"""Many callers at once: those who leave, who do not read, and who send nonsense; the others notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import socket
import string
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from process_support.engine_under_test import wait_for

from nbengine import LLM, SamplingParams
from nbengine.runtime.connection import log_dir
from nbengine.server.launch import stop_server
from tests.support.thorough import amount

Serve = Callable[..., Any]
MEGABYTE = 1 << 20
NONSENSE = amount(1500, thorough=4000)


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
@pytest.mark.timeout(600)
async def test_a_third_of_200_streams_leaves_and_every_other_answer_is_that_of_llm(serve: Serve) -> None:
    draw = random.Random(7)
    prompts = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 60))) for _ in range(200)]
    leaving = [draw.randint(1, 20) if number % 3 == 0 else None for number in range(200)]
    real = {"distributed_executor_backend": "uni", "hf_overrides": {}, "dtype": "float32"}
    # There are too few blocks for all of them: some are preempted.
    served = serve(settings={"max_concurrent_requests": 150}, num_gpu_blocks_override=160, **real)
    limits = httpx2.Limits(max_connections=300, max_keepalive_connections=0)
    await asyncio.to_thread(whole, served, "a", 5)
    served.close_clients()
    descriptors = served.process.num_fds()
    async with httpx2.AsyncClient(base_url=served.record.url, limits=limits, timeout=400) as http:
        texts = await asyncio.gather(
            *(read_stream(http, *one) for one in zip(prompts, [40] * 200, leaving, strict=True))
        )
    for text, expected, after in zip(texts, answers_of_llm(prompts, 40), leaving, strict=True):
        if after is None:
            assert text == expected
        else:
            assert expected.startswith(text)
    served.idle()
    wait_for(lambda: served.process.num_fds() <= descriptors, "the connections to be closed")
    stop_server(served.record)
    assert "ending: 0 requests are being answered" in log_of(served)


def answers_of_llm(prompts: list[str], max_tokens: int) -> list[str]:
    """The greedy answers of the same model in this process."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with LLM("random-tiny", multiprocess=False, dtype="float32", num_gpu_blocks_override=1024) as llm:
        return [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]


def log_of(served: Any) -> str:
    """The text of a server's log."""
    # Names of engines come again; a log's own has the time.
    return max(log_dir().glob(f"{served.llm.name}.server-*.log")).read_text()


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


def raw_request(path: str, body: bytes, *, method: str = "POST", **headers: str) -> bytes:
    """A request as it goes over the wire; `headers` replace the usual ones."""
    usual = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
    named = {**usual, **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


def nonsense() -> list[bytes]:
    """Bad requests, one of each kind."""
    texts, chats = "/v1/completions", "/v1/chat/completions"
    bodies: list[tuple[str, Any]] = [
        (texts, b"{"),
        (texts, b""),
        (texts, b'{"prompt": "\xff\xfe"}'),
        (texts, b'{"prompt": ' + b"[" * 100_000),
        (texts, b'{"prompt": "a", "zzz": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}"),
        (texts, {"prompt": "x" * 5_000}),
        (texts, {"prompt": "a", "temperature": -1}),
        (texts, {"prompt": "a", "n": 10**9}),
        (texts, {"prompt": [10**6]}),
        (texts, {"prompt": "a", "model": "another"}),
        (texts, {"prompt": "a", "structured_outputs": {"regex": "("}}),
        (texts, {"prompt": "a", "logit_bias": {"a": 1}}),
        (chats, {"messages": [{"role": "nobody"}]}),
        (chats, {"messages": []}),
        (chats, {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "nothing"}]}),
        ("/v1/responses", {"input": 7}),
        ("/v1/messages", {"messages": 7}),
        ("/v1/embeddings", {"input": {}}),
        ("/detokenize", {"tokens": [-1]}),
        ("/v1/nothing", {}),
    ]
    found = [
        raw_request(path, body if isinstance(body, bytes) else json.dumps(body).encode())
        for path, body in bodies
    ]
    return [
        *found,
        raw_request(texts, b"{}", method="DELETE"),
        raw_request(texts, b"{}", content_type="text/plain"),
        raw_request(texts, b"{}", host="evil.test"),
        raw_request(texts, b"{}", content_length="-7"),
        raw_request(texts, b"", content_length=str(10**12)),
        b"\x00\xff no HTTP at all\r\n\r\n",
        raw_request(texts, b"{}", x_long="x" * 100_000),
    ]


class Sender:
    """A caller on one connection after another, who reads each answer's status."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes) -> int:
        """Send a request; return the status, 0 where the connection ends without one."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            # One that was no HTTP gets an answer without a length, and the connection ends.
            await (reader.read() if length is None else reader.readexactly(int(length[1])))
        except (ConnectionError, asyncio.IncompleteReadError):
            # What it had sent was not read to its end.
            self.close()
            return 0
        if b"connection: close" in head.lower():
            self.close()
        return int(head.split()[1])

    async def leave(self, request: bytes) -> None:
        """Send a part of a request, and go."""
        self.close()
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(request)
        writer.close()

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Storm:
    """Many callers that send nonsense, while good streams run; both go on until there were enough of either."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._kinds = nonsense()
        self.sent = 0
        self.statuses: set[int] = set()
        self.texts: list[str] = []

    async def rage(self, num_bad: int, num_good: int) -> None:
        """Send at least that many bad requests and read at least that many good streams, all at once."""
        most_bad, most_good = self.sent + num_bad, len(self.texts) + num_good

        def goes_on() -> bool:
            return self.sent < most_bad or len(self.texts) < most_good

        async with httpx2.AsyncClient(base_url=self._url, timeout=500) as http, asyncio.TaskGroup() as tasks:
            for number in range(16):
                tasks.create_task(self._send(number, goes_on))
            tasks.create_task(self._leave(goes_on))
            for _ in range(4):
                tasks.create_task(self._read(http, goes_on))

    async def _send(self, first: int, goes_on: Callable[[], bool]) -> None:
        sender = Sender(self._url)
        number = first
        while goes_on():
            self.statuses.add(await sender.send(self._kinds[number % len(self._kinds)]))
            self.sent += 1
            number += 1
        sender.close()

    async def _leave(self, goes_on: Callable[[], bool]) -> None:
        """Send 10 MB at a time, all of it or half, and half a request's head."""
        sender = Sender(self._url)
        large = raw_request("/v1/completions", b'{"prompt": "' + b"x" * (10 * MEGABYTE) + b'"}')
        while goes_on():
            self.statuses.add(await sender.send(large))
            await sender.leave(large[: 5 * MEGABYTE])
            await sender.leave(large[:40])
            self.sent += 3
        sender.close()

    async def _read(self, http: httpx2.AsyncClient, goes_on: Callable[[], bool]) -> None:
        while goes_on():
            self.texts.append(await read_stream(http, "a", 40, None))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_thousands_of_bad_requests_disturb_nobody_and_take_no_memory(serve: Serve) -> None:
    served = serve(knobs={"step_seconds": 0.005})
    [expected] = {await asyncio.to_thread(whole, served, "a", 40)}
    served.close_clients()
    storm = Storm(served.record.url)
    # What is made once, buffers and caches, is there after this.
    await storm.rage(NONSENSE // 4, 4)
    descriptors, resident = served.process.num_fds(), served.process.memory_info().rss
    await storm.rage(NONSENSE, 8)
    # One large body that each of a few dozen requests left behind would be more.
    assert served.process.memory_info().rss - resident < 64 * MEGABYTE
    assert set(storm.texts) == {expected}
    assert {400, 403, 404, 405, 413, 415} <= storm.statuses <= {0, 400, 403, 404, 405, 413, 415, 431}
    served.idle()
    wait_for(lambda: served.process.num_fds() <= descriptors, "the connections to be closed")
    assert len(log_of(served)) < MEGABYTE
    stop_server(served.record)
    assert "ending: 0 requests are being answered" in log_of(served)


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
