"""This module runs all requests of a comparison at once and moves their outputs into one grid."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, LeaseExpiredError, NBEngineError
from nbengine.magics.comparison.arguments import ComparisonPlan
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.comparison.view import grid_view
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.waits import Watched


class ComparisonRun(Stream[ComparisonResult]):
    """A stream that moves the outputs of many requests into their results and one view.

    An error of one request stays with it. When all have ended, an error is raised if no request has an answer
    or an engine has ended.
    """

    async def _step(self) -> bool:
        return self._step_blocking()

    def _step_blocking(self, timeout: float | None = None) -> bool:
        """Take the outputs that have come; the view's interval, not an output, brings the next call."""
        del timeout
        for index, request in enumerate(self.requests):
            try:
                self._take(request)
            except NBEngineError as error:
                self.result.errors[index] = error
                request.fail(error)
        self._view.update(self.result)
        going_on = {request.origin.client.name for request in self.requests if request.collector}
        for name in self.waits.clients.keys() - going_on:
            self.waits.leave(name)
        if going_on:
            return False
        failure = self._failure()
        if failure is not None:
            raise failure
        return True

    def _take(self, request: Request) -> None:
        output = None if request.collector is None else request.collector.get_nowait()
        if output is not None:
            self.waits.note_output(request.origin.client.name)
            request.result.absorb(output)
            if request.result.finished:
                request.end(shown=request.stop())

    def _failure(self) -> NBEngineError | None:
        errors = self.result.errors
        for error in errors.values():
            if isinstance(error, EngineDeadError | LeaseExpiredError):
                return error
        return errors[0] if len(errors) == len(self.requests) else None

    def _handle(self) -> ComparisonHandle:
        return ComparisonHandle(self.result, self.cancel, self.waits)


def compare(
    shell: InteractiveShell,
    plan: ComparisonPlan,
    requests: Sequence[Request],
    waited_for: Iterable[Watched],
) -> ComparisonRun:
    """Make the stream of the requests of a plan, which have been sent to the clients `waited_for`."""
    settings = [combination.settings for combination in plan.combinations]
    result = ComparisonResult(plan.axes, settings, [request.result for request in requests])
    result.errors = {index: request.error for index, request in enumerate(requests) if request.error}
    view = grid_view(shell, plan, [request.origin.params for request in requests], result)
    return ComparisonRun(result, requests, view, waited_for)
