"""From collectors to a view: awaited, blocking, or in the background."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from nbengine.errors import NBEngineError
from nbengine.magics.generation.answers import EndHandler
from nbengine.magics.generation.ongoing import OngoingRequests
from nbengine.magics.generation.result import GenerationHandle, GenerationResult, Handle
from nbengine.magics.generation.view import View
from nbengine.magics.interrupts import Interrupted, ticking
from nbengine.outputs import RequestOutput

R = TypeVar("R")
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


class Stream(ABC, Generic[R]):
    """What a cell waits for: awaited, blocking, or in the background.

    Between two steps it sleeps for the view's interval while collectors merge what comes: the cost of an update is
    shared by all tokens of the interval, and the first token does not wait.
    """

    def __init__(self, result: R) -> None:
        self.result = result
        self._cancelled = threading.Event()
        self._interrupt_taken = False

    async def run(self) -> None:
        """Stream until the end, on the running event loop.

        Raises:
            Interrupted: this task was cancelled, which is how a kernel interrupts a coroutine.
            NBEngineError: the request or its engine failed; the partial result is shown and kept.
        """
        try:
            async with ticking():
                while not await self._step():
                    await asyncio.sleep(self._interval)
        except asyncio.CancelledError:
            raise self._interrupted() from None
        finally:
            self._end()

    def run_blocking(self) -> None:
        """Stream until the end, in this thread; raises as `run` does."""
        try:
            while not self._step_blocking():
                time.sleep(self._interval)
        except KeyboardInterrupt:
            raise self._interrupted() from None
        finally:
            self._end()

    def run_in_background(self, on_error: Callable[[NBEngineError], None]) -> Handle[R]:
        """Stream in a thread of its own, into the output of the cell that is running now."""
        handle = self._handle()
        # ipykernel keeps the running cell in a context variable: the thread's outputs belong to this cell.
        context = contextvars.copy_context()
        thread = threading.Thread(
            target=context.run,
            args=(self._run_background, handle, on_error),
            name=f"nbengine-{handle!r}",
            daemon=True,
        )
        thread.start()
        return handle

    def cancel(self) -> None:
        """Abort what has not ended and let the background thread finish; callable from any thread."""
        self._cancelled.set()
        self._abort_all()

    def _run_background(self, handle: Handle[R], on_error: Callable[[NBEngineError], None]) -> None:
        try:
            while not self._cancelled.is_set():
                try:
                    if self._step_blocking(_CANCEL_POLL_SECONDS):
                        break
                except TimeoutError:
                    continue
                self._cancelled.wait(self._interval)
            self._end()
        except NBEngineError as error:
            cancelled = self._cancelled.is_set()
            try:
                # Nobody may ever ask the handle: the cell says what happened, too.
                self._end(
                    note="" if cancelled else f"{type(error).__name__}: {getattr(error, 'cause', error)}"
                )
                on_error(error)
            finally:
                handle.settle(None if cancelled else error)
        except BaseException as error:
            handle.settle(error)
            raise
        else:
            handle.settle()

    def _interrupted(self) -> Interrupted:
        self._interrupt_taken = True
        self._abort_all()
        return Interrupted("generation interrupted; what had been written is kept")

    @property
    @abstractmethod
    def _interval(self) -> float:
        """Seconds between two steps."""

    @abstractmethod
    async def _step(self) -> bool:
        """Take and show what comes next; True at the end."""

    @abstractmethod
    def _step_blocking(self, timeout: float | None = None) -> bool:
        """`_step` in this thread; raises TimeoutError where nothing came within `timeout` seconds."""

    @abstractmethod
    def _handle(self) -> Handle[R]:
        """A handle to the result that grows."""

    @abstractmethod
    def _abort_all(self) -> None:
        """End the requests that have not ended."""

    @abstractmethod
    def _end(self, note: str = "") -> None:
        """Keep and show what there is in the end; called once."""


class Generation(Stream[GenerationResult]):
    """Moves a request's outputs into its result and its view."""

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
        super().__init__(GenerationResult(collector.request_id, prompt))
        self._collector = collector
        self._view = view
        self._abort = abort
        self._ongoing = ongoing
        ongoing.add(collector.engine_request_id, foreground=foreground)
        self.on_end: list[EndHandler] = []

    @property
    def _interval(self) -> float:
        return self._view.interval

    async def _step(self) -> bool:
        return self._take(await self._collector.get())

    def _step_blocking(self, timeout: float | None = None) -> bool:
        return self._take(self._collector.get_blocking(timeout))

    def _take(self, output: RequestOutput) -> bool:
        self.result.absorb(output)
        self._view.update(self.result)
        return self.result.finished

    def _handle(self) -> GenerationHandle:
        return GenerationHandle(self.result, self.cancel)

    def _abort_all(self) -> None:
        self._abort(self.result.request_id)

    def _end(self, note: str = "") -> None:
        self._ongoing.discard(self._collector.engine_request_id)
        error = sys.exception()
        failure = error if isinstance(error, NBEngineError) else None
        shown = self.result.finished or self._interrupt_taken or self._cancelled.is_set()
        if not self.result.finished:
            drain(self._collector, self.result)
            self.result.abort()
        try:
            self._view.finish(self.result, note)
        except BaseException:
            shown = False
            raise
        finally:
            for handler in self.on_end:
                handler(shown, failure)


def drain(collector: Collector, result: GenerationResult) -> None:
    """Keep what has arrived but was not shown yet, of a request whose stream is over."""
    # An error that ended the stream is being raised already.
    with contextlib.suppress(NBEngineError):
        output = collector.get_nowait()
        if output is not None:
            result.absorb(output)
