"""Streams from collectors to a view: awaited, blocking, or in the background."""

from __future__ import annotations

import asyncio
import contextvars
import math
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from nbengine.errors import NBEngineError
from nbengine.magics.generation.background import Background
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.result import GenerationHandle, GenerationResult, Handle
from nbengine.magics.generation.view import View
from nbengine.magics.generation.waits import LOOK_SECONDS, WaitNotice, Watched
from nbengine.magics.interrupts import Interrupted, ticking
from nbengine.outputs import RequestOutput
from nbengine.widgets.stop.buttons import StopButtons
from nbengine.widgets.words import seconds

R = TypeVar("R")
_CANCEL_POLL_SECONDS = 0.1
_CLOCK_SECONDS = 0.01
_MOST_ASKED = 32
"""The most requests whose place in the queue is asked for: those of a cell are admitted in their order."""


class Stream(ABC, Generic[R]):
    """A stream that a cell waits for: awaited, blocking, or in the background.

    Between two steps it sleeps for the view's interval while collectors merge the outputs: all tokens of the
    interval share the cost of an update, and the first token does not wait.
    """

    def __init__(self, result: R, view: View[R], waited_for: Iterable[Watched], stops: StopButtons) -> None:
        """Make the stream of a result; `waited_for` are the clients to look at meanwhile, and one of `stops` ends it."""
        self.result = result
        self.waits = WaitNotice(waited_for)
        self.waits.show = view.show_waiting
        self.waits.requests = self._ids_sent_to
        self._view = view
        self._deadline = math.inf
        self._timeout = math.inf
        self._note = ""
        self._cancelled = threading.Event()
        self._interrupt_taken = False
        self._stops = stops
        self._wake: Callable[[], object] | None = None
        """Makes the event loop that waits for the stream abort what has not ended; None where a thread waits."""

    @property
    @abstractmethod
    def requests(self) -> Sequence[Request]:
        """Return the requests that have been sent, at least those that have not ended."""

    def _ids_sent_to(self, name: str) -> list[str]:
        """Return the engine's ids of the first requests that an engine has been sent and that have not ended."""
        sent = (r.collector for r in self.requests if r.origin.client.name == name)
        return [
            collector.engine_request_id for collector in islice(sent, _MOST_ASKED) if collector is not None
        ]

    def end_after(self, timeout: float) -> None:
        """End what has not ended when `timeout` seconds have passed; what has been written by then is kept."""
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            self._deadline = math.inf
            self._note = f"--timeout: ended after {seconds(self._timeout)}"
            self._abort_all()

    @asynccontextmanager
    async def _timed(self) -> AsyncIterator[None]:
        """Look at the time when the deadline has come, while the block runs."""
        if self._deadline == math.inf:
            yield
            return
        left = max(0.0, self._deadline - time.monotonic())
        # The loop's clock may be a little behind.
        timer = asyncio.get_running_loop().call_later(left + _CLOCK_SECONDS, self._check_time)
        try:
            yield
        finally:
            timer.cancel()

    async def run(self) -> None:
        """Stream until the end, on the running event loop.

        Raises:
            Interrupted: this task was cancelled, which is how a kernel interrupts a coroutine.
            NBEngineError: the request or its engine failed; the partial result is shown and kept.
        """
        loop = asyncio.get_running_loop()
        self._wake = partial(loop.call_soon_threadsafe, self._abort_all)
        try:
            with self._stops.offer(self._view.key, self.stop, foreground=True):
                async with ticking(), self.waits.looking(), self._timed():
                    while not await self._step():
                        await asyncio.sleep(self._view.interval)
            self._raise_if_stopped()
        except asyncio.CancelledError:
            raise self._interrupted() from None
        finally:
            self._end()

    def run_blocking(self) -> None:
        """Stream until the end, in this thread; raise as `run` does."""
        try:
            with self._stops.offer(self._view.key, self.stop, foreground=True):
                while not self._step_and_look():
                    time.sleep(self._view.interval)
            self._raise_if_stopped()
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise self._interrupted() from None
        finally:
            self._end()

    def run_in_background(self) -> Handle[R]:
        """Stream in a thread of its own, into the output of the cell that is running now."""
        handle = self._handle()
        self.waits.holds_up = False
        # ipykernel keeps the running cell in a context variable, so the thread's outputs belong to this cell.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run,
            args=(self._run_background, handle),
            name=f"nbengine-{handle!r}",
            daemon=True,
        )
        thread.start()
        return handle

    def stop(self) -> None:
        """End as an interrupt ends the cell that waits; safe on any thread, and does not wait."""
        self._interrupt_taken = True
        if self._wake is not None:
            self._wake()

    def _raise_if_stopped(self) -> None:
        if self._interrupt_taken:
            raise self._interrupted()

    def cancel(self) -> None:
        """Abort the requests that have not ended, so that it ends in the background; safe on any thread."""
        self._cancelled.set()
        self._abort_all()

    def _run_background(self, handle: Handle[R]) -> None:
        with self._settling(handle):
            while not self._cancelled.is_set():
                self.waits.look()
                self._check_time()
                try:
                    if self._step_blocking(_CANCEL_POLL_SECONDS):
                        break
                except TimeoutError:
                    continue
                self._cancelled.wait(self._view.interval)

    @contextmanager
    def _settling(self, handle: Handle[R]) -> Iterator[None]:
        """End the stream with the block, and settle its handle."""
        try:
            with self._stops.offer(self._view.key, self.cancel, foreground=False):
                yield
            self._end()
        except NBEngineError as error:
            cancelled = self._cancelled.is_set()
            try:
                # The handle may never be awaited, so the cell shows the error, too.
                self._end(
                    note="" if cancelled else f"{type(error).__name__}: {getattr(error, 'cause', error)}"
                )
            finally:
                handle.settle(None if cancelled else error)
        except BaseException as error:
            handle.settle(error)
            raise
        else:
            handle.settle()

    def _step_and_look(self) -> bool:
        while True:
            self.waits.look()
            self._check_time()
            # A button that was pressed on another thread.
            self._raise_if_stopped()
            wait = min(_CANCEL_POLL_SECONDS, LOOK_SECONDS, self._deadline - time.monotonic())
            try:
                return self._step_blocking(max(0.0, wait))
            except TimeoutError:
                continue

    def _interrupted(self) -> Interrupted:
        self._interrupt_taken = True
        self._abort_all()
        return Interrupted("generation interrupted; what had been written is kept")

    @abstractmethod
    async def _step(self) -> bool:
        """Take and show the next output; return True at the end."""

    @abstractmethod
    def _step_blocking(self, timeout: float | None = None) -> bool:
        """Do `_step` in this thread; raise TimeoutError if nothing comes within `timeout` seconds."""

    @abstractmethod
    def _handle(self) -> Handle[R]:
        """Make a handle to the result that grows."""

    def _abort_all(self) -> None:
        for request in self.requests:
            request.abort()

    def _end(self, note: str = "") -> None:
        """End the requests that have not ended, and show the final state; this is called once."""
        error = sys.exception()
        failure = error if isinstance(error, NBEngineError) else None
        ended = [(request, request.stop()) for request in self.requests if request.collector is not None]
        is_wanted = self._interrupt_taken or self._cancelled.is_set()
        is_shown = False
        try:
            self._view.finish(self.result, note or self._note)
            is_shown = True
        finally:
            for request, is_complete in ended:
                request.end(failure, shown=is_shown and (is_complete or is_wanted))


class Generation(Stream[GenerationResult]):
    """A stream that moves a request's outputs into its result and its view."""

    def __init__(
        self, request: Request, view: View[GenerationResult], waited_for: Iterable[Watched] = ()
    ) -> None:
        super().__init__(request.result, view, waited_for, request.origin.ongoing.stops)
        self._request = request
        assert request.collector is not None, "the request has not been sent"
        self._collector = request.collector
        request.on_progress = self._show_progress
        self._drawn_at = -math.inf
        """The time at which progress was drawn last."""
        self._task: asyncio.Task[None] | None = None
        """The task that streams in the background, once it has begun."""

    @property
    def requests(self) -> Sequence[Request]:
        """Return the request."""
        return [self._request]

    async def _step(self) -> bool:
        return self._take(await self._collector.get())

    def _step_blocking(self, timeout: float | None = None) -> bool:
        return self._take(self._collector.get_blocking(timeout))

    def _show_progress(self) -> None:
        # The request runs, so that nothing else holds it up.
        self.waits.note_output(self._request.origin.client.name)
        # Steps may be so short that nobody could read what each of them says.
        now = time.monotonic()
        if now - self._drawn_at >= self._view.interval:
            self._drawn_at = now
            self._view.update(self.result)

    def _take(self, output: RequestOutput) -> bool:
        self.waits.note_output(self._request.origin.client.name)
        self.result.absorb(output)
        self._view.update(self.result)
        return self.result.finished

    def run_in_background(self) -> GenerationHandle:
        """Stream on the loop of the background, into the output of the cell that is running now."""
        handle = self._handle()
        self.waits.holds_up = False
        Background.shared().start(self._run_on_beats(handle))
        return handle

    def cancel(self) -> None:
        super().cancel()
        Background.shared().call_soon(self._wake_task)

    def _wake_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run_on_beats(self, handle: Handle[GenerationResult]) -> None:
        beat = Background.shared().beat
        with self._settling(handle):
            self._task = asyncio.current_task()
            try:
                async with self.waits.looking(), self._timed():
                    while not self._cancelled.is_set() and not await self._step():
                        await beat.wait(self, self._view.interval)
            except asyncio.CancelledError:
                if not self._cancelled.is_set():
                    raise
            finally:
                beat.leave(self)

    def _handle(self) -> GenerationHandle:
        return GenerationHandle(self.result, self.cancel, self.waits)
