"""All requests of a comparison at once: sent before the first output is read, and moved into one grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nbengine.errors import EngineDeadError, LeaseExpiredError, NBEngineError
from nbengine.magics.comparison.arguments import ComparisonPlan
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.comparison.view import GridView
from nbengine.magics.generation.answers import EndHandler, keep_answer
from nbengine.magics.generation.ongoing import OngoingRequests
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Collector, Stream, drain
from nbengine.magics.generation.submission import PreparedRequest
from nbengine.magics.session import AttachedEngine


class ComparedRequest:
    """One request of a comparison. `collector` is None before it is sent, and when nothing more comes."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self.result = GenerationResult("", prepared.options.prompt)
        self.collector: Collector | None = None
        self.on_end: list[EndHandler] = []


class ComparisonRun(Stream[ComparisonResult]):
    """Moves the outputs of many requests into their results and one view.

    What goes wrong with one request stays with it. An error is raised when all have ended, if none has an answer or an
    engine has gone.
    """

    def __init__(
        self,
        plan: ComparisonPlan,
        prepared: Sequence[PreparedRequest],
        view_of: Callable[[ComparisonResult], GridView],
        ongoing: OngoingRequests,
        tell: Callable[[GenerationResult, PreparedRequest], None],
        drop: Callable[[AttachedEngine], None],
    ) -> None:
        """`tell` lets a result know what was asked; `drop` is told of an engine that has died."""
        self.requests = [ComparedRequest(request) for request in prepared]
        """In the order of the results."""
        settings = [combination.settings for combination in plan.combinations]
        results = [request.result for request in self.requests]
        super().__init__(ComparisonResult(plan.axes, settings, results))
        self._ongoing = ongoing
        self._drop = drop
        for request in self.requests:
            tell(request.result, request.prepared)
        self._view_of = view_of
        self._view: GridView | None = None

    def send(self, *, foreground: bool) -> None:
        """Send all requests. What is refused has ended with its error.

        Raises:
            NBEngineError: all were refused.
        """
        try:
            for index, request in enumerate(self.requests):
                try:
                    collector = request.prepared.send()
                except NBEngineError as error:
                    self._fail(index, error)
                    continue
                request.collector = collector
                request.result.request_id = collector.request_id
                self._ongoing.add(collector.engine_request_id, foreground=foreground)
                client = request.prepared.engine.client
                keep_answer(self._ongoing.answers, request, client, collector.engine_request_id)
        except BaseException:
            self._abort_all()
            self._end_requests()
            raise
        if len(self.result.errors) == len(self.requests):
            raise self.result.errors[0]
        self._view = self._view_of(self.result)

    @property
    def _grid(self) -> GridView:
        assert self._view is not None, "nothing has been sent"
        return self._view

    @property
    def _interval(self) -> float:
        return self._grid.interval

    async def _step(self) -> bool:
        return self._step_blocking()

    def _step_blocking(self, timeout: float | None = None) -> bool:
        """Take what has come: the caller comes again after the view's interval, which wakes it for all requests."""
        del timeout
        changed = [
            index for index, request in enumerate(self.requests) if request.collector and self._take(index)
        ]
        self._grid.update(changed)
        if any(request.collector for request in self.requests):
            return False
        failure = self._failure()
        if failure is not None:
            raise failure
        return True

    def _take(self, index: int) -> bool:
        request = self.requests[index]
        assert request.collector is not None
        try:
            output = request.collector.get_nowait()
        except NBEngineError as error:
            self._fail(index, error)
            return True
        if output is None:
            return False
        request.result.absorb(output)
        if request.result.finished:
            self._close(request, shown=True)
        return True

    def _fail(self, index: int, error: NBEngineError) -> None:
        request = self.requests[index]
        self.result.errors[index] = error
        request.result.abort("error")
        self._close(request, shown=False, error=error)
        if isinstance(error, EngineDeadError):
            self._drop(request.prepared.engine)

    def _close(self, request: ComparedRequest, *, shown: bool, error: NBEngineError | None = None) -> None:
        if request.collector is not None:
            self._ongoing.discard(request.collector.engine_request_id)
            for handler in request.on_end:
                handler(shown, error)
        request.collector = None

    def _failure(self) -> NBEngineError | None:
        errors = self.result.errors
        for error in errors.values():
            if isinstance(error, EngineDeadError | LeaseExpiredError):
                return error
        return errors[0] if len(errors) == len(self.requests) else None

    def _handle(self) -> ComparisonHandle:
        return ComparisonHandle(self.result, self.cancel)

    def _abort_all(self) -> None:
        for request in self.requests:
            collector = request.collector
            if collector is not None:
                request.prepared.engine.client.abort_soon(collector.request_id)

    def _end(self, note: str = "") -> None:
        try:
            self._end_requests()
        finally:
            self._grid.finish(note)

    def _end_requests(self) -> None:
        for request in self.requests:
            if request.collector is not None:
                drain(request.collector, request.result)
                shown = request.result.finished or self._interrupt_taken or self._cancelled.is_set()
                if not request.result.finished:
                    request.result.abort()
                self._close(request, shown=shown)
