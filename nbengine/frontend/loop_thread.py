"""The event loop, on a daemon thread of its own, that owns the sockets of every `AsyncLLM` of this process."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from nbengine.errors import NBEngineError

T = TypeVar("T")
_EXIT_TIMEOUT = 1.0


class LoopThread:
    """An asyncio loop that runs apart from the caller's: it works whether or not the caller has one running."""

    _shared: ClassVar[LoopThread | None] = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="nbengine-loop", daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> LoopThread:
        """The loop thread of this process, started when it is first asked for."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls()
                atexit.register(cls._shared.stop)
            return cls._shared

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback(*args)` on the loop, in the order of the calls; does not wait."""
        self.loop.call_soon_threadsafe(callback, *args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            NBEngineError: called on the loop's own thread, which would wait for itself.
        """
        if self.is_current:
            coroutine.close()
            raise NBEngineError("a blocking call on nbengine's own loop thread would never return")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def stop(self) -> None:
        """End the thread; what is scheduled is dropped."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_EXIT_TIMEOUT)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()


def _forget_after_fork() -> None:
    # A forked child has the object but not the thread.
    LoopThread._shared = None
    LoopThread._shared_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_after_fork)
