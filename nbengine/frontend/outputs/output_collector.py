"""The hand-over of one request's outputs from the thread that makes them to their reader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping

from nbengine.errors import NBEngineError
from nbengine.outputs import PromptProgress, RequestOutput, joined
from nbengine.sampling_params import RequestOutputKind

logger = logging.getLogger(__name__)

_MAX_PARTS = 64
"""Deltas that wait side by side before they are joined: joining copies all that is unread."""

PromptCallback = Callable[[PromptProgress], object]


class DueCall:
    """A call of `function`, on the event loop `loop`, when a request has something to read.

    Outputs of many requests come in one message, and to wake a task for each of them costs more than all else that is
    done with a token.
    """

    __slots__ = ("_loop", "function")

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        self._loop = loop
        self.function = function

    def get_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the call."""
        return self._loop


Waiter = asyncio.Future[None] | DueCall


class RequestOutputCollector:
    """The outputs of one request: any one thread puts them, one coroutine on any loop or one blocking thread
    reads them, or a function is called when there is something to read.

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
        """The future or the call of a reader that waits for the next output."""
        self._call: DueCall | None = None
        self._num_blocked = 0

    def put(self, delta: RequestOutput) -> None:
        """Hand over an output and wake the reader."""
        waiter = self.add(delta)
        if waiter is not None:
            wake([waiter])

    def add(self, delta: RequestOutput) -> Waiter | None:
        """Hand over an output. If a coroutine waits for one, return the future that it waits on, or else the call
        that is due, to be given to `wake`."""
        with self._lock:
            self._parts.append(delta)
            if len(self._parts) > _MAX_PARTS:
                self._parts = [self._parts[0], joined(self._parts[1:])]
            if self._num_blocked:
                self._changed.notify_all()
            waiter, self._waiter = self._waiter, None
            return waiter

    def report(self, progress: PromptProgress) -> Waiter | None:
        """Note how much of the prompt has been read. If the reader waits and wants to know, return what `add`
        returns."""
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
            output = self._take()
            call = self._call
            if call is None:
                return output
            if self._error is None and not self._is_due:
                self._waiter = call
                return output
        # What has come behind the output is told apart from it.
        wake([call])
        return output

    def listen(self, call: DueCall) -> None:
        """Have a call made when there is something to read, and after each `get_nowait` when there is more. It is made
        soon, not in the middle of what brings the output."""
        with self._lock:
            self._call = call
            unread = self._parts and self._parts[-1] is not self._read
            if not (unread or self._error is not None or self._is_due):
                self._waiter = call
                return
        wake([call])

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
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._waiter = waiter
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
    """Wake the coroutines behind these futures and make these calls, with one call into each of their event loops."""
    here = asyncio._get_running_loop()
    by_loop: dict[asyncio.AbstractEventLoop, list[Waiter]] = {}
    own: list[Waiter] = []
    known = None
    for waiter in waiters:
        # Nearly always they have the same loop.
        loop = waiter.get_loop()
        if loop is not known:
            known, own = loop, by_loop.setdefault(loop, [])
        own.append(waiter)
    for loop, its_waiters in by_loop.items():
        if loop is here:
            _resolve(its_waiters)
            continue
        # A closed loop has no reader left to wake.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_resolve, its_waiters)


def _resolve(waiters: list[Waiter]) -> None:
    calls = []
    for waiter in waiters:
        if isinstance(waiter, DueCall):
            calls.append(waiter.function)
        elif not waiter.done():
            waiter.set_result(None)
    if calls:
        # What else comes in this turn of the loop is joined first; and a call may do what must not happen in the
        # middle of a batch, such as to abort a request.
        asyncio.get_running_loop().call_soon(_make, calls)


def _make(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            # The readers of other requests are called all the same.
            logger.exception("outputs of a request cannot be handed over")
