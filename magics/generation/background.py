"""The loop of what streams in the background: one thread, and one beat at which all of it is drawn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from nbengine.client.threads.loop_thread import LoopThread
from nbengine.runtime.one_per_process import OnePerProcess
from nbengine.widgets.live import send_together


class Beat:
    """A beat for the streams of one loop, which are drawn one after the other when it comes.

    Their messages then cost a third of what they cost at times of their own: the threads that pass them on wake once.
    Each stream asks for an interval that allows for all the others. The beat's interval is the mean, so that all
    together send no more than their intervals allow.
    """

    def __init__(self) -> None:
        self._intervals: dict[object, float] = {}
        """The interval that each stream has asked for last, in seconds."""
        self._next: asyncio.Future[None] | None = None

    async def wait(self, stream: object, interval: float) -> None:
        """Wait for the next beat, for a stream that asks for `interval` seconds between two."""
        self._intervals[stream] = interval
        if self._next is None:
            loop = asyncio.get_running_loop()
            self._next = loop.create_future()
            loop.call_later(sum(self._intervals.values()) / len(self._intervals), self._come)
        # The future is that of all streams, and one of them may be cancelled.
        await asyncio.shield(self._next)

    def leave(self, stream: object) -> None:
        """Forget a stream, which has ended."""
        self._intervals.pop(stream, None)

    def _come(self) -> None:
        beat, self._next = self._next, None
        if beat is not None:
            beat.set_result(None)


class Background(OnePerProcess):
    """The loop for what streams in the background of this process, on a thread of its own, and its beat.

    It is not the loop of the clients' sockets: what is drawn here may take a moment, or wait for that loop.
    """

    def __init__(self) -> None:
        self.beat = Beat()
        self._thread = LoopThread("nbengine-background")
        self._thread.call_soon(send_together, self._thread.loop.call_soon)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, whose outputs belong to the cell that is running now."""
        # ipykernel keeps the running cell in a context variable: the callback has this context, and so has the task.
        self._thread.call_soon(self._begin, coroutine)

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Call a function on the loop, unless it has ended with the interpreter."""
        self._thread.call_if_open(callback)

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = self._thread.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            # It is told as that of a thread is: nobody may ever ask the handle.
            about = (type(error), error, error.__traceback__, threading.current_thread())
            threading.excepthook(threading.ExceptHookArgs(about))
