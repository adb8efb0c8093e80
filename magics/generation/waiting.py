"""The two ways of a run of a magic to wait for awaitables: on the kernel's loop, or without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

from nbengine.magics.interrupts import ticking

Wait = Callable[[Awaitable[Any]], Awaitable[Any]]
"""A function that waits for what an awaitable brings."""


async def awaited(value: Awaitable[Any]) -> Any:
    """Wait for an awaitable on the running loop."""
    async with ticking():
        return await value


async def awaited_elsewhere(value: Awaitable[Any]) -> Any:
    """Wait for an awaitable on a loop in a thread of its own, while this thread stands."""
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = Future()
    ended: Future[Any] = Future()

    async def run() -> Any:
        task = asyncio.current_task()
        assert task is not None
        begun.set_result((asyncio.get_running_loop(), task))
        return await value

    def run_in_thread() -> None:
        try:
            ended.set_result(asyncio.run(run()))
        except BaseException as error:  # noqa: BLE001 (the one who waits gets it)
            ended.set_exception(error)

    threading.Thread(target=run_in_thread, name="nbengine-tool", daemon=True).start()
    try:
        return ended.result()
    except KeyboardInterrupt:
        loop, task = begun.result()
        loop.call_soon_threadsafe(task.cancel)
        raise


def without_a_loop(coroutine: Coroutine[Any, Any, bool]) -> bool:
    """Run a coroutine that waits for nothing on a loop, and return what it returns."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        result: bool = ended.value
        return result
    coroutine.close()
    raise AssertionError("a coroutine waits for a loop that there is not")
