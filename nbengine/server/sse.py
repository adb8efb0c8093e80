"""Streams of server-sent events: their encoding, and a response that watches its reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from nbengine.errors import NBEngineError
from nbengine.server.protocol.errors import ApiError, api_error_of
from nbengine.server.replies import error_reply

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""
PING = b": ping\n\n"
"""A comment: readers of events pass over it."""
HEADER_PATIENCE = 5.0
"""Seconds for which the status waits for the first event: a request that is refused gets a status of its own."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

_encoder = msgspec.json.Encoder()


def event(data: Any, name: str | None = None) -> bytes:
    """Encode an event; `data` is anything that msgspec makes JSON of, which has no line breaks."""
    if name is None:
        return b"data: %b\n\n" % _encoder.encode(data)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encoder.encode(data))


def openai_failure(error: ApiError) -> bytes:
    """Encode the end of a stream of OpenAI's that fails."""
    return event(error.body()) + DONE


async def until_disconnect(receive: Receive, work: Awaitable[T]) -> T | None:
    """Return the result of `work`, or None once the caller has gone; `work` is cancelled then."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        await _cancelled(task, gone)


class EventStream:
    """A response of events, as an ASGI application.

    `events` yields encoded events; it is closed when the reader has gone. An exception before the first event
    becomes a response with a status of its own, later `failure` makes the last event of it.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        ping_interval: float,
        failure: Callable[[ApiError], bytes] = openai_failure,
    ) -> None:
        self._events = events
        self._failure = failure
        self._ping_interval = ping_interval
        self._started = False
        self._is_sending = False
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they or the reader are at their end."""
        pump = asyncio.create_task(self._pump(scope, receive, send))
        watch = asyncio.create_task(self._watch(receive, send))
        try:
            await asyncio.wait((pump, watch), return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                await pump
        finally:
            await _cancelled(pump, watch)
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body: Send = scope["state"]["send_body"]
        first = asyncio.ensure_future(anext(self._events, None))
        try:
            done, _ = await asyncio.wait((first,), timeout=HEADER_PATIENCE)
            if not done:
                await self._start(send)
            chunk = await first
            if not self._started:
                await self._start(send)
            if chunk is not None:
                await self._send(send_body, chunk)
                async for chunk in self._events:
                    await self._send(send_body, chunk)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:  # noqa: BLE001 (whatever it is, its caller must be told)
            api_error = api_error_of(error)
            if api_error.status >= 500:
                _log_failure(error, api_error)
            if not self._started:
                await error_reply(api_error, scope["path"])(scope, receive, send)
                return
            await self._send(send, self._failure(api_error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _cancelled(first)

    async def _start(self, send: Send) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def _send(self, send: Send, chunk: bytes) -> None:
        # Where the reader is behind, this waits, and what the engine makes meanwhile is joined.
        self._is_sending = True
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
        self._is_sending = False
        self._num_sent += 1

    async def _watch(self, receive: Receive, send: Send) -> None:
        """Return when the reader has gone; send comments while there is nothing else to send."""
        gone = asyncio.create_task(_disconnected(receive))
        seen = 0
        try:
            while not (await asyncio.wait((gone,), timeout=self._ping_interval))[0]:
                if self._started and self._num_sent == seen and not self._is_sending:
                    await self._send(send, PING)
                seen = self._num_sent
        finally:
            await _cancelled(gone)


def _log_failure(error: Exception, api_error: ApiError) -> None:
    if isinstance(error, NBEngineError):
        logger.warning("a request failed: %s", api_error)
    else:
        logger.error("a request failed", exc_info=error)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel what still runs, and wait for its end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
