"""The outputs of all requests to an engine that answer one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from nbengine.outputs import PromptProgress, RequestOutput
from nbengine.server.limits import Ticket

Indexed = tuple[int, RequestOutput | PromptProgress]


class Stream(Protocol):
    """The part of an `OutputStream` that is needed here."""

    finished: bool

    def take(self) -> RequestOutput | None:
        """Return what has come, joined to one output; None if there is nothing."""

    def listen(self, function: Callable[[], object]) -> None:
        """Have a function called when there is something to take, and after each `take` when there is more."""

    def close(self) -> None:
        """Abort the request unless it is finished."""


class Outputs:
    """The outputs of several requests, for one reader: each with its request's index, as it comes.

    The reader takes them each time that the function is called which it has given to `listen`. What it does not take
    stays in the streams, which join it. `ticket` has the places of the requests; `close` gives them back.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.finished = False
        """Everything has been taken."""
        self._ticket = ticket
        self._streams: list[Stream] = []
        self._num_unfinished = 0
        self._due: list[int] = []
        """The indices of the streams that have something, where there are several."""
        self._progress: list[Indexed] = []

    async def open(self, openings: Sequence[Coroutine[Any, Any, Stream]]) -> None:
        """Take in the streams of the requests, in their order, when all are sent.

        Raises:
            NBEngineError: a request is not possible; `close` ends the others.
        """
        if len(openings) == 1:
            self._streams = [await openings[0]]
        else:
            await self._open_all(openings)
        self._num_unfinished = len(self._streams)

    def listen(self, reader: Callable[[], object]) -> None:
        """Have a function called on the running event loop when there is something to take, and after each `take` when
        there is more. It may be called once behind `close`."""
        if len(self._streams) == 1:
            self._streams[0].listen(reader)
            return
        for index, stream in enumerate(self._streams):
            stream.listen(partial(self._note, index, reader))

    def report(self, index: int, progress: PromptProgress) -> None:
        """Take note of how much of a prompt has been read; the stream tells it while something is taken of it."""
        self._progress.append((index, progress))

    def take(self) -> Iterable[Indexed]:
        """Return what has come.

        Raises:
            NBEngineError: a request has failed; with several requests the iterator raises it, behind what others have.
        """
        if len(self._streams) > 1:
            return self._take_due()
        return self._take_of(0)

    def close(self) -> None:
        """Abort what has not ended, and give the places back; a second call does nothing."""
        # Streams refer to this object, through what they are to call.
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.close()
        self._ticket.release()

    async def _open_all(self, openings: Sequence[Coroutine[Any, Any, Stream]]) -> None:
        tasks: list[asyncio.Task[Stream]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(opening) for opening in openings]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._streams = [task.result() for task in tasks if not task.cancelled() and not task.exception()]

    def _take_due(self) -> Iterator[Indexed]:
        due, self._due = self._due, []
        for index in due:
            yield from self._take_of(index)

    def _take_of(self, index: int) -> list[Indexed]:
        stream = self._streams[index]
        output = stream.take()
        found: list[Indexed] = []
        if self._progress:
            found, self._progress = self._progress, found
        if output is not None:
            found.append((index, output))
            if stream.finished:
                self._num_unfinished -= 1
                self.finished = not self._num_unfinished
        return found

    def _note(self, index: int, reader: Callable[[], object]) -> None:
        self._due.append(index)
        if len(self._due) == 1:
            # Others have something in the same turn of the loop, and the reader takes all of it together.
            asyncio.get_running_loop().call_soon(reader)
