"""The hand-over of one request's outputs from the thread that makes them to their reader."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from nbengine.errors import NBEngineError
from nbengine.outputs import PromptProgress, RequestOutput, joined
from nbengine.sampling_params import RequestOutputKind

_MAX_PARTS = 64
"""Deltas that wait side by side before they are joined: joining copies all that is unread."""

Waiter = asyncio.Future[None]
PromptCallback = Callable[[PromptProgress], object]


class RequestOutputCollector:
    """The outputs of one request: any one thread puts them, one coroutine on any loop or one blocking thread
    reads them.

    Deltas are put, whatever the kind of output. Reading joins those that have come since the last time and,
    with `CUMULATIVE`, all before: a slow reader misses nothing, and what it has not read costs little more
    than the tokens themselves.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str, engine_request_id: str) -> None:
        self.request_id = request_id
        """The caller's id, which the outputs carry."""
        self.engine_request_id = engine_request_id
        """The unique id under which the engine knows the request; `abort` takes either."""
        self.trace_headers: Mapping[str, str] | None = None
        """The headers with which the request came, for its observers."""
        self.on_prompt_progress: PromptCallback | None = None
        """The function that the reader calls, while it waits, with the progress of a prompt that takes several
        steps."""
        self._progress: PromptProgress | None = None
        """The progress of which the reader has not been told."""
        self._cumulative = output_kind is RequestOutputKind.CUMULATIVE
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._parts: list[RequestOutput] = []
        """The deltas of which the next output is made; with `CUMULATIVE` the first of them is the previous
        output."""
        self._read: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: Waiter | None = None
        self._num_blocked = 0

    def put(self, delta: RequestOutput) -> None:
        """Hand over an output and wake the reader."""
        waiter = self.add(delta)
        if waiter is not None:
            wake([waiter])

    def add(self, delta: RequestOutput) -> Waiter | None:
        """Hand over an output. If a coroutine waits for one, return the future that it waits on, to be given
        to `wake`."""
        with self._lock:
            self._parts.append(delta)
            if len(self._parts) > _MAX_PARTS:
                self._parts = [self._parts[0], joined(self._parts[1:])]
            if self._num_blocked:
                self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
            return waiter

    def report(self, progress: PromptProgress) -> Waiter | None:
        """Note how much of the prompt has been read. If a coroutine waits and wants to know, return the future that
        it waits on, to be given to `wake`."""
        with self._lock:
            self._progress = progress
            if self.on_prompt_progress is None:
                return None
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
            return waiter

    def tell_progress(self) -> None:
        """Call `on_prompt_progress` with the progress that has been noted and not told."""
        with self._lock:
            progress, self._progress = self._progress, None
        if progress is not None and self.on_prompt_progress is not None:
            self.on_prompt_progress(progress)

    def put_error(self, error: Exception) -> None:
        """End the stream with an error, which the reader gets after what is still unread."""
        with self._lock:
            self._error = error
            self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
        if waiter is not None:
            wake([waiter])

    def get_nowait(self) -> RequestOutput | None:
        """Return the outputs that have come, joined to one; None if there is nothing yet.

        Raises:
            NBEngineError: the request failed, or its last output has been taken already.
        """
        if self._progress is not None:
            self.tell_progress()
        with self._lock:
            return self._take()

    async def get(self) -> RequestOutput:
        """Wait for the next output; raises as `get_nowait` does."""
        while True:
            if self._progress is not None:
                self.tell_progress()
            with self._lock:
                output = self._take()
                if output is not None:
                    return output
                if self._progress is not None and self._is_due:
                    continue
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            await waiter

    def get_blocking(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the next output in this thread; raises as `get_nowait` does.

        An interrupt is raised at once and loses nothing: the next call returns what came meanwhile.

        Raises:
            TimeoutError: nothing came within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        output = None
        try:
            while output is None:
                if self._progress is not None:
                    self.tell_progress()
                with self._changed:
                    while (output := self._take()) is None and not self._is_due:
                        remaining = None if deadline is None else deadline - time.monotonic()
                        if remaining is not None and remaining <= 0:
                            raise TimeoutError(
                                f"request {self.request_id} gave no output within {timeout:g} s"
                            )
                        self._wait(remaining)
        except KeyboardInterrupt:
            # It may come between taking an output and returning it.
            if output is not None:
                self._put_back(output)
            raise
        return output

    @property
    def _is_due(self) -> bool:
        """Tell whether the reader is to be told of the prompt."""
        return self._progress is not None and self.on_prompt_progress is not None

    def _put_back(self, output: RequestOutput) -> None:
        with self._lock:
            self._read = None
            if not self._cumulative:
                self._parts.insert(0, output)

    def _take(self) -> RequestOutput | None:
        parts = self._parts
        # With `CUMULATIVE` the output that was read last stays among the parts.
        if parts and parts[-1] is not self._read:
            output = parts[0] if len(parts) == 1 else joined(parts)
            self._parts = [output] if self._cumulative else []
            self._read = output
            return output
        if self._error is not None:
            raise self._error
        if self._read is not None and self._read.finished:
            raise NBEngineError(f"request {self.request_id} is finished, nothing more will come")
        return None

    def _wait(self, timeout: float | None) -> None:
        self._num_blocked += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._num_blocked -= 1


def wake(waiters: Iterable[Waiter]) -> None:
    """Wake the coroutines behind these futures, with one call into each of their event loops."""
    here = asyncio._get_running_loop()
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    for waiter in waiters:
        by_loop.setdefault(waiter.get_loop(), []).append(waiter)
    for loop, its_waiters in by_loop.items():
        if loop is here:
            _resolve(its_waiters)
            continue
        # A closed loop has no reader left to wake.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, its_waiters)


def _resolve(waiters: list[Waiter]) -> None:
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
