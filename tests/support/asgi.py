"""One request to an ASGI application, without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Reply:
    """The answer of an application."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]

    def events(self) -> list[Any]:
        """The data of the events; "[DONE]" stays a text."""
        found = [line[6:] for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [data if data == "[DONE]" else json.loads(data) for data in found]


class Call:
    """A request that may be ended from the caller's side."""

    def __init__(self) -> None:
        self.reply = Reply()
        self.gone = asyncio.Event()
        self.changed = asyncio.Event()
        self.before_send: Callable[[], Awaitable[object]] | None = None
        """The wait before each part of the answer."""

    async def run(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes | Sequence[bytes],
        headers: Mapping[str, str],
    ) -> Reply:
        parts = [body] if isinstance(body, bytes) else list(body)
        messages = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
            for number, part in enumerate(parts)
        ]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop(0)
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if self.before_send is not None:
                await self.before_send()
            if message["type"] == "http.response.start":
                self.reply.status = message["status"]
                self.reply.headers = {
                    name.decode().lower(): value.decode() for name, value in message["headers"]
                }
            else:
                self.reply.parts.append(message.get("body", b""))
                if not message.get("more_body"):
                    self.reply.complete = True
                    self.gone.set()
            self.changed.set()

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path.partition("?")[0],
            "raw_path": path.partition("?")[0].encode(),
            "root_path": "",
            "query_string": path.partition("?")[2].encode(),
            "scheme": "http",
            "server": ("127.0.0.1", 8000),
            "client": ("127.0.0.1", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        await app(scope, receive, send)
        return self.reply


async def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send a request, `body` as JSON unless it is bytes or a list of such, and return the reply."""
    raw = body if isinstance(body, bytes | list) else b"" if body is None else json.dumps(body).encode()
    is_sent = body is not None
    given = {
        "host": "127.0.0.1:8000",
        **({"content-type": "application/json"} if is_sent else {}),
        **(headers or {}),
    }
    return await Call().run(app, method or ("POST" if is_sent else "GET"), path, raw, given)
