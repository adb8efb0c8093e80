"""This module makes one stream of what several requests of an engine give."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from nbengine.outputs import PromptProgress, RequestOutput

Indexed = tuple[int, RequestOutput | PromptProgress]


class Inbox:
    """It holds what several requests have given and nobody has taken: one output at a time, and of each prompt that
    is being read the latest progress."""

    def __init__(self) -> None:
        self._ready: asyncio.Queue[tuple[int, RequestOutput | None] | None] = asyncio.Queue()
        self._room = asyncio.Semaphore(1)
        self._progress: dict[int, PromptProgress] = {}

    async def put(self, index: int, output: RequestOutput) -> None:
        """Add an output, once there is room for it."""
        await self._room.acquire()
        self._ready.put_nowait((index, output))

    def report(self, index: int, progress: PromptProgress) -> None:
        """Add progress, in the place of earlier progress that nobody has taken."""
        if index not in self._progress:
            self._ready.put_nowait((index, None))
        self._progress[index] = progress

    def end(self) -> None:
        """Note that nothing more comes."""
        self._ready.put_nowait(None)

    async def items(self) -> AsyncGenerator[Indexed, None]:
        """Yield what comes, until the end; there is room for the next output when the one before has been used."""
        while (item := await self._ready.get()) is not None:
            index, output = item
            if output is None:
                yield index, self._progress.pop(index)
            else:
                yield index, output
                self._room.release()


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]], inbox: Inbox | None = None
) -> AsyncGenerator[Indexed, None]:
    """Yield the outputs of several streams as they come, each with its stream's index, and the progress that `inbox`
    is told of; the first error ends all of them.

    What nobody reads stays in the streams, which join it.
    """
    given = inbox or Inbox()

    async def pump(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        async with aclosing(stream):
            async for output in stream:
                await given.put(index, output)

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(streams):
                    group.create_task(pump(index, stream))
        finally:
            given.end()

    pumping = asyncio.create_task(pump_all())
    try:
        async with aclosing(given.items()) as items:
            async for item in items:
                yield item
        try:
            await pumping
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    finally:
        pumping.cancel()
        await asyncio.gather(pumping, return_exceptions=True)
