"""Real clients of OpenAI and Anthropic that get the answers of a test instead of a server's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx2
import msgspec
from anthropic import Anthropic
from openai import OpenAI

Answer = Mapping[str, Any] | Iterable[Mapping[str, Any]]


def event_bytes(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Write events as a stream has them: each with its type as its name."""
    lines = [
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    ]
    return b"".join(lines)


def events_in(stream: bytes) -> list[dict[str, Any]]:
    """Read the events of a stream, each of which must have its type as its name, and be JSON on one line."""
    data = [line.removeprefix(b"data: ") for line in stream.splitlines() if line.startswith(b"data: ")]
    events: list[dict[str, Any]] = [msgspec.json.decode(one) for one in data]
    assert event_bytes(events) == stream
    return events


def openai_client(answer: Answer, status: int = 200) -> OpenAI:
    """Make a client whose every call gets `answer`: a body, or the events of a stream."""
    return OpenAI(base_url="http://test/v1", api_key="key", max_retries=0, http_client=_http(answer, status))


def anthropic_client(answer: Answer, status: int = 200) -> Anthropic:
    """Make a client whose every call gets `answer`: a body, or the events of a stream."""
    return Anthropic(base_url="http://test", api_key="key", max_retries=0, http_client=_http(answer, status))


def _http(answer: Answer, status: int) -> httpx2.Client:
    if isinstance(answer, Mapping):
        kind, content = "application/json", msgspec.json.encode(answer)
    else:
        kind, content = "text/event-stream", event_bytes(answer)

    def answered(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(status, content=content, headers={"content-type": kind})

    return httpx2.Client(transport=httpx2.MockTransport(answered))
