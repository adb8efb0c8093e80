"""The calls of functions that score: beside the stream, in a thread with an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")


class ScoreCalls(Generic[Key]):
    """Calls one behind the other; what is awaited waits beside the others.

    One thread begins the calls and takes their outcomes. The thread that makes them starts with the first one.
    """

    def __init__(self) -> None:
        self._outcomes: queue.SimpleQueue[tuple[Key, Any]] = queue.SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._waiting: set[asyncio.Task[None]] = set()
        self._is_ended = False

    def begin(self, key: Key, call: Callable[[], Any]) -> None:
        """Make a call soon."""
        if self._loop is None:
            self._start()
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._call, key, call)

    def take(self) -> Iterator[tuple[Key, Any]]:
        """Yield what has come of calls since the last time: a value, or the exception in its place."""
        while not self._outcomes.empty():
            yield self._outcomes.get()

    def end(self) -> None:
        """Begin no further call, and cancel what is awaited; a function that runs comes to its end."""
        self._is_ended = True
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)

    def _start(self) -> None:
        begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        # A kernel keeps the running cell in a context variable, so that what functions print belongs to this cell.
        run = contextvars.copy_context().run
        threading.Thread(
            target=run, args=(asyncio.run, self._serve(begun)), name="nbengine-scores", daemon=True
        ).start()
        self._loop, self._stop = begun.result()

    async def _serve(self, begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
        stop = asyncio.Event()
        begun.set_result((asyncio.get_running_loop(), stop))
        await stop.wait()

    def _call(self, key: Key, call: Callable[[], Any]) -> None:
        if self._is_ended:
            return
        try:
            value = call()
        except BaseException as error:  # noqa: BLE001 (whatever a function raises is its answer's score error)
            self._outcomes.put((key, error))
            return
        if not inspect.isawaitable(value):
            self._outcomes.put((key, value))
            return
        task = asyncio.get_running_loop().create_task(self._wait_for(key, value))
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)

    async def _wait_for(self, key: Key, value: Awaitable[Any]) -> None:
        try:
            outcome = await value
        except BaseException as error:  # noqa: BLE001 (as above)
            outcome = error
        self._outcomes.put((key, outcome))
