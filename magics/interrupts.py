"""Interrupts of coroutines in a kernel: their delivery and their appearance."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

TICK_SECONDS = 0.05


class Interrupted(KeyboardInterrupt):
    """An interrupt that nbengine has handled; IPython shows it as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


# Frontends and tools that run notebooks recognise an interrupt by the name of the error.
Interrupted.__name__ = KeyboardInterrupt.__name__


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt end what runs in the block: while a cell awaits, a kernel only notes it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@asynccontextmanager
async def ticking() -> AsyncIterator[None]:
    """Wake the running loop every `TICK_SECONDS`.

    A kernel's SIGINT handler only schedules a callback, which a loop that nothing wakes would not run.
    """
    ticker = asyncio.create_task(_tick())
    try:
        yield
    finally:
        ticker.cancel()


async def _tick() -> None:
    while True:
        await asyncio.sleep(TICK_SECONDS)
