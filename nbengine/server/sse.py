"""Streams of server-sent events: a response that watches its reader."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from nbengine.errors import NBEngineError
from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.server.events import DONE, event
from nbengine.server.http_protocol import WRITE_PART
from nbengine.server.outputs import Outputs
from nbengine.server.protocol.errors import ApiError, api_error_of
from nbengine.server.replies import error_reply
from nbengine.server.translate.conversation import renamed

logger = logging.getLogger(__name__)

T = TypeVar("T")

PING = b": ping\n\n"
"""A comment: readers of events pass over it."""
HEADER_PATIENCE = 5.0
"""Seconds for which the status waits for the first event: a request that is refused gets a status of its own."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


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


class Events(Protocol):
    """The part of a route that makes events of outputs."""

    def take(self, position: int, output: RequestOutput | PromptProgress) -> bytes:
        """Return the encoded events that an output brings, b"" if there are none."""

    def end(self) -> bytes:
        """Return the encoded events at the end of the answer."""


class EventStream:
    """A response of events, as an ASGI application.

    Where outputs come, their events are made and written in the same turn of the loop; a task runs only at the
    beginning, where the reader is behind, and at the end.

    Args:
        send_request: sends what is asked and returns its outputs, which are closed in the end.
        events: makes events of the outputs.
        ping_interval: seconds without an event after which there is a comment.
        failure: makes the last event of an error. An error before the first event becomes a response with a status of
            its own.
        names: the fields of this API that stand for those of Chat Completions, for errors.
    """

    def __init__(
        self,
        send_request: Callable[[], Awaitable[Outputs]],
        events: Events,
        *,
        ping_interval: float,
        failure: Callable[[ApiError], bytes] = openai_failure,
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._send_request = send_request
        self._events = events
        self._ping_interval = ping_interval
        self._failure = failure
        self._names = names
        self._outputs: Outputs | None = None
        self._error: Exception | None = None
        """The error that ends the stream behind what has been made."""
        self._write: Callable[[bytes], bool] = _never
        """Writes at once and returns True, or returns False."""
        self._parked: asyncio.Future[bytes] | None = None
        """The pump waits here while what comes is written without it."""
        self._is_due = False
        """Something has come that nobody has taken."""
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
            try:
                await _cancelled(pump, watch)
            finally:
                outputs, self._outputs = self._outputs, None
                if outputs is not None:
                    outputs.close()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = asyncio.ensure_future(self._first())
        try:
            done, _ = await asyncio.wait((first,), timeout=HEADER_PATIENCE)
            if not done:
                await self._start(send)
            outputs, chunk = await first
            if not self._started:
                await self._start(send)
            self._write = scope["state"].get(WRITE_PART, _never)
            while True:
                if chunk:
                    await self._send(send, chunk)
                if self._error is not None:
                    raise self._error
                if outputs.finished:
                    break
                chunk = await self._park()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as error:  # noqa: BLE001 (whatever it is, its caller must be told)
            api_error = renamed(api_error_of(error), self._names)
            if api_error.status >= 500:
                _log_failure(error, api_error)
            if not self._started:
                await error_reply(api_error, scope["path"])(scope, receive, send)
                return
            await self._send(send, self._failure(api_error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await _cancelled(first)

    async def _first(self) -> tuple[Outputs, bytes]:
        """Send the request and wait for the first events."""
        outputs = self._outputs = await self._send_request()
        outputs.listen(self._on_due)
        chunk = await self._park()
        if self._error is not None and not chunk:
            raise self._error
        return outputs, chunk

    async def _park(self) -> bytes:
        """Wait while what comes can be written at once; return what cannot, b"" at the end."""
        parked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._parked = parked
        if self._is_due:
            self._is_due = False
            self._on_due()
        return await parked

    def _on_due(self) -> None:
        """Write what has come, or leave it: to the pump, or in the outputs until the pump is back."""
        parked, outputs = self._parked, self._outputs
        if parked is None or parked.done() or outputs is None:
            self._is_due = True
            return
        chunk = self._made(outputs)
        if chunk and self._write(chunk):
            self._num_sent += 1
            chunk = b""
        if chunk or outputs.finished or self._error is not None:
            self._parked = None
            parked.set_result(chunk)

    def _made(self, outputs: Outputs) -> bytes:
        """Return the events of what has come, those at the end included; an error is kept, to be raised behind them."""
        chunks = []
        try:
            for position, output in outputs.take():
                chunks.append(self._events.take(position, output))
            if outputs.finished:
                chunks.append(self._events.end())
        except Exception as error:  # noqa: BLE001 (the pump raises it)
            self._error = error
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

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


def _never(chunk: bytes) -> bool:
    del chunk
    return False


async def take_all(
    send_request: Callable[[], Awaitable[Outputs]],
    take: Callable[[int, RequestOutput | PromptProgress], object],
) -> None:
    """Send what is asked, and give each output to `take`; whatever is raised ends it."""
    outputs = await send_request()
    try:
        due = asyncio.Event()
        outputs.listen(due.set)
        while not outputs.finished:
            await due.wait()
            due.clear()
            for position, output in outputs.take():
                take(position, output)
    finally:
        outputs.close()


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
