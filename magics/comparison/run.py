"""This module runs all requests of a comparison at once, moves their outputs into one grid, and scores them."""

from __future__ import annotations

from collections.abc import Sequence

from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, LeaseExpiredError, NBEngineError
from nbengine.magics.comparison.arguments import ComparisonPlan
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.comparison.view import grid_view
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.view import View
from nbengine.magics.scores.judging import judge_of
from nbengine.magics.scores.scoring import Scoring
from nbengine.magics.session import AttachedEngine


class ComparisonRun(Stream[ComparisonResult]):
    """A stream that moves the outputs of many requests into their results and one view.

    An error of one request stays with it. An answer is scored once it has ended, while others go on. When all
    have ended and are scored, an error is raised if no request has an answer or an engine has ended.
    """

    def __init__(
        self,
        result: ComparisonResult,
        requests: Sequence[Request],
        view: View[ComparisonResult],
        engines: Sequence[AttachedEngine],
        scoring: Scoring,
    ) -> None:
        super().__init__(result, requests, view, [engine.client for engine in engines])
        self._scoring = scoring

    async def _step(self) -> bool:
        return self._step_blocking()

    def _step_blocking(self, timeout: float | None = None) -> bool:
        """Take the outputs that have come; the view's interval, not an output, brings the next call."""
        del timeout
        for index, request in enumerate(self.requests):
            try:
                self._take(index, request)
            except NBEngineError as error:
                self.result.errors[index] = error
                request.fail(error)
        self._scoring.step()
        self._view.update(self.result)
        going_on = {request.origin.client.name for request in self.requests if request.collector}
        for name in self.waits.clients.keys() - going_on:
            self.waits.leave(name)
        if going_on or not self._scoring.is_done:
            return False
        failure = self._failure()
        if failure is not None:
            raise failure
        return True

    def _take(self, index: int, request: Request) -> None:
        output = None if request.collector is None else request.collector.get_nowait()
        if output is not None:
            self.waits.note_output(request.origin.client.name)
            request.result.absorb(output)
            if request.result.finished:
                request.end(shown=request.stop())
                self._scoring.begin(index, request.result)

    def _abort_all(self) -> None:
        super()._abort_all()
        self._scoring.abort()

    def _end(self, note: str = "") -> None:
        self._scoring.end()
        super()._end(note)

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
    engines: Sequence[AttachedEngine],
    submitter: Submitter,
) -> ComparisonRun:
    """Make the stream of the requests of a plan, each of which has been sent to the engine at its position."""
    settings = [combination.settings for combination in plan.combinations]
    result = ComparisonResult(
        plan.axes,
        settings,
        [request.result for request in requests],
        num_each=plan.num_each,
        scores=plan.scores.names,
    )
    result.errors = {index: request.error for index, request in enumerate(requests) if request.error}
    params = [request.origin.params for request in requests]
    view = grid_view(shell, plan, params, result, requests[0].origin.ongoing.views)
    options = [combination.options for combination in plan.combinations]
    judge = judge_of(plan.scores, result.results, engines, options, submitter)
    scoring = Scoring(plan.scores, result.scores, judge)
    return ComparisonRun(result, requests, view, engines, scoring)
