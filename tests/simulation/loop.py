"""An event loop on a simulated thread, as far as `AsyncMPClient` uses one, with asyncio's order of things."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from tests.simulation import primitives, state
from tests.simulation.polling import SimPoller
from tests.simulation.processes import make_pair

Callback = tuple[Callable[..., object], tuple[Any, ...]]


class SimLoop:
    """`asyncio.AbstractEventLoop`: a turn runs what was ready when it began, then what the descriptors have told."""

    def __init__(self) -> None:
        self._ready: deque[Callback] = deque()
        self._readers: dict[int, Callback] = {}
        self._poller = SimPoller()
        self._closed = False
        process = state.process()
        reader, self._wake = make_pair()
        self._reader = process.open_number(reader)
        process.open_number(self._wake)
        self._poller.register(self._reader, zmq.POLLIN)

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self._ready.append((callback, args))

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")
        self._ready.append((callback, args))
        self._wake.write(b"\0")
        state.hub().maybe_preempt()

    def call_later(self, seconds: float, callback: Callable[..., object], *args: Any) -> None:
        process = state.process()

        def due() -> None:
            if not self._closed and not process.is_dead:
                self._ready.append((callback, args))
                self._wake.write(b"\0")

        state.hub().call_later(seconds, due)

    def add_reader(self, descriptor: int, callback: Callable[..., object], *args: Any) -> None:
        self._poller.register(descriptor, zmq.POLLIN)
        self._readers[descriptor] = callback, args

    def remove_reader(self, descriptor: int) -> bool:
        if self._readers.pop(descriptor, None) is None:
            return False
        self._poller.unregister(descriptor)
        return True

    def run_forever(self) -> None:
        """Run until the process ends."""
        process = state.process()
        end = process.descriptors[self._reader]
        while not self._closed:
            for key, _ in self._poller.poll(0 if self._ready else None):
                if key == self._reader:
                    end.buffer.clear()
                elif (found := self._readers.get(key)) is not None:
                    self._ready.append(found)
            for _ in range(len(self._ready)):
                callback, args = self._ready.popleft()
                callback(*args)

    def stop(self) -> None:
        self._closed = True


class SimLoopThread:
    """`LoopThread`."""

    def __init__(self) -> None:
        self.loop = SimLoop()
        self._thread = primitives.SimThread(target=self.loop.run_forever, name="nbengine-loop", daemon=True)
        primitives.thread_start(self._thread)

    @property
    def is_current(self) -> bool:
        return primitives.current_thread() is self._thread

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon_threadsafe(callback, *args)

    def call_if_open(self, callback: Callable[..., object], *args: Any) -> bool:
        self.loop.call_soon_threadsafe(callback, *args)
        return True

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine that never waits on the loop, and wait for its result."""
        done = primitives.SimEvent()
        results: list[Any] = []

        def step() -> None:
            try:
                coroutine.send(None)
            except StopIteration as end:
                results.append(end.value)
            else:
                raise asyncio.InvalidStateError("the coroutine waits for something")
            finally:
                done.set()

        try:
            self.call_soon(step)
            done.wait()
        finally:
            coroutine.close()
        return results[0]
