"""The outputs of one request for its reader, who ends it by leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nbengine.frontend.outputs.output_collector import DueCall, RequestOutputCollector
from nbengine.outputs import RequestOutput


class OutputStream:
    """The outputs of a request that has been sent, for one reader on one event loop.

    The reader awaits `get`, or calls `take` each time that the function is called which it has given to `listen`; at the
    end, or where it goes no further, it calls `close`.

    Args:
        collector: where the outputs come.
        abort: ends a request by its engine's id, on any thread.
        question: a timer that is to run no longer than until the first output; None: there is none.
    """

    __slots__ = ("_abort", "_collector", "_question", "finished")

    def __init__(
        self,
        collector: RequestOutputCollector,
        abort: Callable[[str], None],
        question: asyncio.TimerHandle | None = None,
    ) -> None:
        self._collector = collector
        self._abort = abort
        self._question = question
        self.finished = False
        """The last output has been given out."""

    async def get(self) -> RequestOutput:
        """Wait for the next output, into which all is joined that has come; raises as `take` does."""
        output = await self._collector.get()
        self.finished = output.finished
        self._answer_question()
        return output

    def take(self) -> RequestOutput | None:
        """Return what has come, joined to one output; None if there is nothing.

        Raises:
            NBEngineError: the request failed, or its last output has been taken already.
        """
        output = self._collector.get_nowait()
        if output is not None:
            # Each token comes here: it is not to cost a further call.
            self.finished = output.finished
            if self._question is not None:
                self._answer_question()
        return output

    def listen(self, function: Callable[[], object]) -> None:
        """Have a function called on the running event loop when there is something to take, and after each `take` when
        there is more. It may be called once behind `close`."""
        self._collector.listen(DueCall(asyncio.get_running_loop(), function))

    def close(self) -> None:
        """Abort the request unless it is finished; a second call does nothing."""
        self._answer_question()
        if not self.finished:
            self.finished = True
            self._abort(self._collector.engine_request_id)

    def _answer_question(self) -> None:
        if self._question is not None:
            self._question.cancel()
            self._question = None
