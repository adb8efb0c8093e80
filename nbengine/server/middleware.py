"""The gate before the routes, as an ASGI application: keys, hosts, sizes, request ids, and the load header."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable
from functools import partial

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nbengine.errors import InvalidArgumentError
from nbengine.server.load_header import load_format, load_header
from nbengine.server.protocol.errors import INVALID_REQUEST, ApiError, bad_request, unavailable
from nbengine.server.replies import error_reply
from nbengine.server.service import EngineService, trace_headers
from nbengine.server.settings import ServerSettings, is_loopback

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset(("/health", "/ready", "/version"))
"""Paths that need no key, and that are answered in every state."""
METRICS_PATH = "/metrics"
"""The path that is answered until the end: Prometheus has the last figures from it."""
MOST_DISCARDED = 64 << 20
"""Bytes of a body that is too large that are read all the same: its sender looks for the answer afterwards."""
_REQUEST_ID = re.compile(rb"[\w.:-]{1,128}", re.ASCII)
_WITH_BODY = ("POST", "PUT", "PATCH")


class Gate:
    """The outermost application: refuses what the routes need not see, and reads bodies for them.

    A route finds its request's id in `request.state.request_id`.
    """

    def __init__(self, app: ASGIApp, service: EngineService, settings: ServerSettings) -> None:
        self._app = app
        self._service = service
        self._settings = settings
        self._digests = [hashlib.sha256(key.encode()).digest() for key in settings.api_keys]
        self._hosts = frozenset(host.lower() for host in settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        outgoing = _Outgoing(send, request_id, partial(self._load, headers))
        service = self._service
        service.begin()
        room = _BodyRoom(service, self._settings.max_total_body_bytes)
        trace_headers.set(_trace_headers(headers))
        try:
            self._check_caller(scope, headers)
            if scope["method"] in _WITH_BODY:
                receive = _replayed(await self._body(headers, receive, room), receive)
            await self._app(scope, receive, outgoing)
        except ApiError as error:
            if not outgoing.status:
                await error_reply(error, scope["path"])(scope, receive, outgoing)
        finally:
            service.end()
            room.give_back()

    def _load(self, headers: dict[bytes, bytes]) -> bytes | None:
        try:
            kind = load_format(headers.get(b"endpoint-load-metrics-format"))
        except InvalidArgumentError as error:
            logger.debug("%s", error)
            return None
        return None if kind is None else load_header(self._service.stats, kind)

    def _check_caller(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Raise the error for one who may not ask, or asks in a way that a foreign page could."""
        if scope["path"] in OPEN_PATHS:
            return
        if self._digests:
            if not self._has_key(headers):
                raise ApiError(
                    401,
                    INVALID_REQUEST,
                    "invalid_api_key",
                    None,
                    "this server wants an API key: Authorization: Bearer KEY, or x-api-key: KEY",
                )
        elif not self._is_known_host(headers.get(b"host", b"").decode("latin-1")):
            raise ApiError(
                403,
                INVALID_REQUEST,
                "unknown_host",
                None,
                "a server without an API key answers only under this machine's own names; allow others with "
                "--allowed-host, or set a key",
            )
        if scope["method"] in _WITH_BODY and not _is_json(headers.get(b"content-type", b"")):
            raise ApiError(
                415,
                INVALID_REQUEST,
                "unsupported_media_type",
                None,
                "the body's Content-Type must be application/json",
            )
        if self._service.is_draining and scope["path"] != METRICS_PATH:
            self._service.check_ready()

    def _has_key(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        bearer = token.strip() if scheme.lower() == b"bearer" else b""
        digests = [hashlib.sha256(given).digest() for given in (bearer, headers.get(b"x-api-key", b""))]
        # Both are compared with all keys, so that the time tells nothing.
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)

    def _is_known_host(self, value: str) -> bool:
        host = value.rpartition(":")[0] if re.search(r":\d+$", value) else value
        return is_loopback(host.lower()) or {host.lower(), value.lower()} & self._hosts != frozenset()

    async def _body(self, headers: dict[bytes, bytes], receive: Receive, room: _BodyRoom) -> bytes:
        """Read a body into `room`.

        Raises:
            ApiError: it is too large (413), comes too slowly (408), ends early (400), or there are too many (503).
        """
        most = self._settings.max_body_bytes
        declared = _length(headers)
        if declared is not None and declared > most:
            if declared <= MOST_DISCARDED:
                await self._read(receive, 0, room, discarding=True)
            raise _too_large(most)
        return await self._read(receive, most, room)

    async def _read(self, receive: Receive, most: int, room: _BodyRoom, *, discarding: bool = False) -> bytes:
        parts: list[bytes] = []
        total = 0
        more = True
        while more:
            try:
                message = await asyncio.wait_for(receive(), self._settings.read_timeout)
            except TimeoutError:
                raise ApiError(
                    408, INVALID_REQUEST, "request_timeout", None, "the body came too slowly"
                ) from None
            if message["type"] == "http.disconnect":
                raise bad_request("the body ends early", None, "incomplete_body")
            part, more = message.get("body", b""), message.get("more_body", False)
            total += len(part)
            if discarding or total > most:
                if total > MOST_DISCARDED:
                    break
                parts.clear()
                room.give_back()
                continue
            room.take(len(part))
            parts.append(part)
        if not discarding and total > most:
            raise _too_large(most)
        return b"".join(parts)


class _BodyRoom:
    """The part of a request's body, from its first byte on, in what all bodies may have together."""

    def __init__(self, service: EngineService, most: int) -> None:
        self._service = service
        self._most = most
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Take note of bytes that have come.

        Raises:
            ApiError: all bodies together have too many (503).
        """
        if self._service.num_body_bytes + num_bytes > self._most:
            raise unavailable("the server has too many bodies in memory", "too_many_bodies")
        self._service.num_body_bytes += num_bytes
        self._num_bytes += num_bytes

    def give_back(self) -> None:
        """Take note that the body is gone."""
        self._service.num_body_bytes -= self._num_bytes
        self._num_bytes = 0


class _Outgoing:
    """The sending side of a request; it adds headers, that of the load as it is then, and remembers the status."""

    def __init__(self, send: Send, request_id: str, load: Callable[[], bytes | None]) -> None:
        self._send = send
        self._request_id = request_id.encode()
        self._load = load
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            own = [(b"x-request-id", self._request_id)]
            if (load := self._load()) is not None:
                own.append((b"endpoint-load-metrics", load))
            if self.status in (408, 413):
                # Part of the body may still be under way.
                own.append((b"connection", b"close"))
            message = {**message, "headers": [*message.get("headers", ()), *own]}
        await self._send(message)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body at once, and then what comes behind it."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _trace_headers(headers: dict[bytes, bytes]) -> dict[str, str] | None:
    """Return the headers that make a request part of a trace, None if there are none."""
    found = {name: headers[name] for name in (b"traceparent", b"tracestate") if name in headers}
    return {name.decode(): value.decode("latin-1") for name, value in found.items()} or None


def _length(headers: dict[bytes, bytes]) -> int | None:
    text = headers.get(b"content-length", b"")
    # More digits than any length has are no number worth reading.
    return int(text) if text.isdigit() and len(text) < 20 else None


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _too_large(most: int) -> ApiError:
    message = f"the body is larger than {most} bytes"
    return ApiError(413, INVALID_REQUEST, "request_too_large", None, message)
