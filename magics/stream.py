"""One generation from its collector to its view: awaited, blocking, or in the background."""

from __future__ import annotations

import asyncio
import contextvars
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from nbengine.errors import NBEngineError
from nbengine.magics.answers import EndHandler
from nbengine.magics.interrupts import Interrupted, ticking
from nbengine.magics.ongoing import OngoingRequests
from nbengine.magics.result import GenerationHandle, GenerationResult
from nbengine.magics.view import View
from nbengine.outputs import RequestOutput

_CANCEL_POLL_SECONDS = 0.1


class Collector(Protocol):
    """The part of `RequestOutputCollector` that a generation reads."""

    request_id: str
    engine_request_id: str

    async def get(self) -> RequestOutput:
        """Wait for the next output."""

    def get_nowait(self) -> RequestOutput | None:
        """Return what there is."""

    def get_blocking(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the next output in this thread."""


def _ignore_end(shown: bool, error: NBEngineError | None) -> None:
    """Nobody wants to know."""


class Generation:
    """Moves a request's outputs into its result and its view.

    Between two updates it sleeps for the view's interval while the collector merges what comes: the cost of an
    update is shared by all tokens of the interval, and the first token does not wait.
    """

    def __init__(
        self,
        collector: Collector,
        prompt: str,
        view: View,
        abort: Callable[[str], None],
        ongoing: OngoingRequests,
        *,
        foreground: bool,
    ) -> None:
        self.result = GenerationResult(collector.request_id, prompt)
        self._collector = collector
        self._view = view
        self._abort = abort
        self._ongoing = ongoing
        ongoing.add(collector.engine_request_id, foreground=foreground)
        self._cancelled = threading.Event()
        self._interrupt_taken = False
        self.on_end: EndHandler = _ignore_end

    async def run(self) -> None:
        """Stream until the end, on the running event loop.

        Raises:
            Interrupted: this task was cancelled, which is how a kernel interrupts a coroutine.
            NBEngineError: the request or its engine failed; the partial result is shown and kept.
        """
        try:
            async with ticking():
                while not self._take(await self._collector.get()):
                    await asyncio.sleep(self._view.interval)
        except asyncio.CancelledError:
            raise self._interrupted() from None
        finally:
            self._end()

    def run_blocking(self) -> None:
        """Stream until the end, in this thread; raises as `run` does."""
        try:
            while not self._take(self._collector.get_blocking()):
                time.sleep(self._view.interval)
        except KeyboardInterrupt:
            raise self._interrupted() from None
        finally:
            self._end()

    def run_in_background(self, on_error: Callable[[NBEngineError], None]) -> GenerationHandle:
        """Stream in a thread of its own, into the output of the cell that is running now."""
        handle = GenerationHandle(self.result, self.cancel)
        # ipykernel keeps the running cell in a context variable: the thread's outputs belong to this cell.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run,
            args=(self._run_background, handle, on_error),
            name=f"nbengine-{self.result.request_id}",
            daemon=True,
        )
        thread.start()
        return handle

    def cancel(self) -> None:
        """Abort the request and let the background thread finish; callable from any thread."""
        self._cancelled.set()
        self._abort(self.result.request_id)

    def _run_background(self, handle: GenerationHandle, on_error: Callable[[NBEngineError], None]) -> None:
        try:
            while not self._take(self._next_unless_cancelled()):
                self._cancelled.wait(self._view.interval)
            self._end()
        except NBEngineError as error:
            cancelled = self._cancelled.is_set()
            # Nobody may ever ask the handle: the cell says what happened, too.
            self._end(note="" if cancelled else f"{type(error).__name__}: {getattr(error, 'cause', error)}")
            on_error(error)
            handle.settle(None if cancelled else error)
        except BaseException as error:
            handle.settle(error)
            raise
        else:
            handle.settle()

    def _next_unless_cancelled(self) -> RequestOutput | None:
        while not self._cancelled.is_set():
            try:
                return self._collector.get_blocking(timeout=_CANCEL_POLL_SECONDS)
            except TimeoutError:
                continue
        return None

    def _take(self, output: RequestOutput | None) -> bool:
        if output is None:
            return True
        self.result.absorb(output)
        self._view.update(self.result)
        return self.result.finished

    def _interrupted(self) -> Interrupted:
        self._interrupt_taken = True
        self._abort(self.result.request_id)
        return Interrupted("generation interrupted; what had been written is kept")

    def _end(self, note: str = "") -> None:
        self._ongoing.discard(self._collector.engine_request_id)
        error = sys.exception()
        failure = error if isinstance(error, NBEngineError) else None
        shown = self.result.finished or self._interrupt_taken or self._cancelled.is_set()
        if not self.result.finished:
            self._drain()
            self.result.abort()
        self._view.finish(self.result, note)
        self.on_end(shown, failure)

    def _drain(self) -> None:
        """Keep what has arrived but was not shown yet."""
        try:
            output = self._collector.get_nowait()
        except NBEngineError:
            return  # the error that ended the stream is being raised already
        if output is not None:
            self.result.absorb(output)
