"""The thread with the event loop that owns the sockets of every `AsyncLLM` of this process."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from nbengine.errors import EngineDeadError, NBEngineError
from nbengine.runtime.one_per_process import OnePerProcess

T = TypeVar("T")
_EXIT_TIMEOUT = 1.0
_ENDED = "the interpreter is exiting, and this client of the engine has ended with it"


class LoopThread(OnePerProcess):
    """An asyncio loop on its own daemon thread: it works whether or not the caller runs a loop."""

    def __init__(self, name: str = "nbengine-loop") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @classmethod
    @contextmanager
    def adopted(cls) -> Iterator[LoopThread]:
        """Have this thread, with the loop that it runs, be the shared one until the end of the block.

        It is for a program whose readers are all on that loop: what it reads goes from no thread to another.

        Raises:
            NBEngineError: the process has a loop thread already.
        """
        adopted = cls.__new__(cls)
        adopted.loop = asyncio.get_running_loop()
        adopted._thread = threading.current_thread()
        with cls._shared_lock:
            if cls._shared is not None:
                raise NBEngineError("the loop thread of this process runs already")
            cls._shared = adopted
        try:
            yield adopted
        finally:
            with cls._shared_lock:
                cls._shared = None

    @property
    def is_current(self) -> bool:
        """Tell whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run `callback(*args)` on the loop, in the order of the calls; do not wait for it.

        Raises:
            EngineDeadError: the loop has ended with the interpreter, and with it every engine's client.
        """
        if not self.call_if_open(callback, *args):
            raise EngineDeadError(_ENDED)

    def call_if_open(self, callback: Callable[..., object], *args: Any) -> bool:
        """Run a callback like `call_soon`, unless the loop has ended, when it is of no use;
        return whether the loop runs."""
        try:
            self.loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if self.loop.is_closed():
                return False
            raise
        return True

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; do not wait for it.

        Raises:
            EngineDeadError: the loop has ended with the interpreter.
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        except RuntimeError:
            coroutine.close()
            if self.loop.is_closed():
                raise EngineDeadError(_ENDED) from None
            raise

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            NBEngineError: called on the loop's own thread, which would wait for itself.
            EngineDeadError: the loop has ended with the interpreter.
        """
        if self.is_current:
            coroutine.close()
            raise NBEngineError("a blocking call on nbengine's own loop thread would never return")
        return self.submit(coroutine).result()

    def stop(self) -> None:
        """End the thread, and drop what is scheduled; another call does nothing."""
        self.call_if_open(self.loop.stop)
        self._thread.join(_EXIT_TIMEOUT)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()


@atexit.register
def _stop_shared() -> None:
    if LoopThread._shared is not None:
        LoopThread._shared.stop()
