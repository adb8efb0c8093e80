"""The hand-over of one request's outputs from the thread that makes them to whoever reads them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

from nbengine.errors import NBEngineError
from nbengine.outputs import RequestOutput
from nbengine.sampling_params import RequestOutputKind


class RequestOutputCollector:
    """One request's outputs: put by any one thread, read by one coroutine on any loop or by one blocking thread.

    It holds at most one output: what the reader has not taken is merged with what follows (deltas are
    concatenated, cumulative outputs replaced), so that a slow reader costs no memory and misses nothing.
    """

    def __init__(self, output_kind: RequestOutputKind, request_id: str, engine_request_id: str) -> None:
        self.request_id = request_id
        """The caller's id, which the outputs carry."""
        self.engine_request_id = engine_request_id
        """The unique id, under which the engine knows the request; `abort` takes either."""
        self._aggregate = output_kind is RequestOutputKind.DELTA
        self._changed = threading.Condition(threading.Lock())
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._exhausted = False
        self._waiter: asyncio.Future[None] | None = None
        self._num_blocked = 0

    def put(self, output: RequestOutput) -> None:
        """Hand over an output."""
        with self._changed:
            if self._output is None:
                self._output = output
            else:
                self._output.add(output, aggregate=self._aggregate)
            self._wake()

    def put_error(self, error: Exception) -> None:
        """End the stream with an error, which the reader gets after what is still unread."""
        with self._changed:
            self._error = error
            self._wake()

    def get_nowait(self) -> RequestOutput | None:
        """Return what there is, None if there is nothing yet.

        Raises:
            NBEngineError: the request failed, or its last output has been taken already.
        """
        with self._changed:
            return self._take()

    async def get(self) -> RequestOutput:
        """Wait for the next output; raises as `get_nowait` does."""
        while True:
            with self._changed:
                output = self._take()
                if output is not None:
                    return output
                waiter = asyncio.get_running_loop().create_future()
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
            with self._changed:
                while (output := self._take()) is None:
                    remaining = None if deadline is None else deadline - time.monotonic()
                    if remaining is not None and remaining <= 0:
                        raise TimeoutError(f"request {self.request_id} gave no output within {timeout:g} s")
                    self._wait(remaining)
        except KeyboardInterrupt:
            if output is not None:
                self._put_back(output)
            raise
        return output

    def _put_back(self, output: RequestOutput) -> None:
        with self._changed:
            if self._output is not None:
                output.add(self._output, aggregate=self._aggregate)
            self._output = output

    def _take(self) -> RequestOutput | None:
        output, self._output = self._output, None
        if output is not None:
            self._exhausted = output.finished
            return output
        if self._error is not None:
            raise self._error
        if self._exhausted:
            raise NBEngineError(f"request {self.request_id} is finished, nothing more will come")
        return None

    def _wait(self, timeout: float | None) -> None:
        self._num_blocked += 1
        try:
            self._changed.wait(timeout)
        finally:
            self._num_blocked -= 1

    def _wake(self) -> None:
        if self._num_blocked:
            self._changed.notify_all()
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            # A closed loop has no reader left to wake.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
