"""This module runs the requests of a comparison, moves their outputs into one grid, and scores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from nbengine.errors import EngineDeadError, LeaseExpiredError, NBEngineError
from nbengine.magics.comparison.arguments import ComparisonPlan
from nbengine.magics.comparison.result import ComparisonHandle, ComparisonResult
from nbengine.magics.comparison.sending import MOST_IN_A_STEP, Sender, kept_by_position
from nbengine.magics.comparison.view import grid_view
from nbengine.magics.generation.request import Request
from nbengine.magics.generation.result import GenerationResult
from nbengine.magics.generation.stream import Stream
from nbengine.magics.generation.submission import Submitter
from nbengine.magics.generation.view import View
from nbengine.magics.kept_runs.recording import Occasion, Recorder
from nbengine.magics.scores.judging import judge_of
from nbengine.magics.scores.scoring import Scoring
from nbengine.magics.session import AttachedEngine
from nbengine.widgets.stop.buttons import StopButtons
from nbengine.widgets.words import count, print_quietly


class ComparisonRun(Stream[ComparisonResult]):
    """A stream that moves the outputs of many requests into their results and one view.

    An error of one request stays with it. An answer is scored once it has ended, while others go on. When all
    have ended and are scored, an error is raised if no request has an answer or an engine has ended.
    """

    def __init__(
        self,
        result: ComparisonResult,
        sender: Sender,
        view: View[ComparisonResult],
        engines: Sequence[AttachedEngine],
        scoring: Scoring,
        stops: StopButtons,
    ) -> None:
        super().__init__(result, view, [engine.client for engine in engines], stops)
        self._sender = sender
        self._scoring = scoring
        for position, found in enumerate(result):
            if found.finished and position not in result.errors:
                scoring.begin(position, found)

    @property
    def requests(self) -> Sequence[Request]:
        """Return the requests that have been sent and have not ended."""
        return list(self._sender.open.values())

    async def _step(self) -> bool:
        return self._step_blocking()

    def _step_blocking(self, timeout: float | None = None) -> bool:
        """Take the outputs that have come; the view's interval, not an output, brings the next call."""
        del timeout
        sender = self._sender
        for position, request in list(sender.open.items()):
            try:
                self._take(position, request)
            except NBEngineError as error:
                sender.failed(position, error)
        sender.fill(MOST_IN_A_STEP)
        self._scoring.step()
        self._view.update(self.result)
        going_on = sender.engines_in_use
        for name in self.waits.clients.keys() - going_on:
            self.waits.leave(name)
        if going_on or not self._scoring.is_done:
            return False
        failure = self._failure()
        if failure is not None:
            raise failure
        return True

    def _take(self, position: int, request: Request) -> None:
        output = None if request.collector is None else request.collector.get_nowait()
        if output is not None:
            self.waits.note_output(request.origin.client.name)
            request.result.absorb(output)
            if request.result.finished:
                request.end(shown=request.stop())
                self._sender.ended(position)
                self._scoring.begin(position, request.result)

    def _abort_all(self) -> None:
        self._sender.stop()
        super()._abort_all()
        self._scoring.abort()

    def _end(self, note: str = "") -> None:
        self._sender.stop()
        self._scoring.end()
        super()._end(note)

    def _failure(self) -> NBEngineError | None:
        errors = self.result.errors
        for error in errors.values():
            if isinstance(error, EngineDeadError | LeaseExpiredError):
                return error
        return errors[0] if len(errors) == len(self.result) else None

    def _handle(self) -> ComparisonHandle:
        return ComparisonHandle(self.result, self.cancel, self.waits)


@dataclass(frozen=True)
class Comparison:
    """A comparison that is to be made: its plan, and by position the engine that each request goes to."""

    plan: ComparisonPlan
    engines: Sequence[AttachedEngine]
    name: str
    """The name that all its runs share."""
    judge: AttachedEngine | None = None
    """The engine that judges; None: each one its own answers."""

    def occasion(self, position: int) -> Occasion:
        """Return what the run of a request is kept with."""
        return Occasion("comparison", self.name, self.plan.combinations[position].settings)


@dataclass(frozen=True)
class ComparisonDeeds:
    """The deeds that the cells of a comparison's grid can do."""

    comparison: Comparison
    result: ComparisonResult
    submitter: Submitter
    recorder: Recorder

    def ask_again(self, position: int) -> Request:
        """Send the request of a position once more.

        Raises:
            NBEngineError, UsageError: the engine cannot be reached, or refuses it.
        """
        request = self.prepare(position)
        request.send(foreground=False)
        return request

    def prepare(self, position: int) -> Request:
        """Make the request of a position."""
        comparison = self.comparison
        options = comparison.plan.combinations[position].options
        return self.submitter.prepare(comparison.engines[position], options, comparison.occasion(position))

    def scoring(self, *, background: bool = True) -> Scoring:
        """Make the scoring of answers; `background` says that no cell waits for the judge."""
        result, plan = self.result, self.comparison.plan
        options = [replace(each.options, background=background) for each in plan.combinations]
        engines = self.comparison.engines
        if self.comparison.judge is not None:
            # Ranks and raw prompts are for the engines that answer.
            engines = [self.comparison.judge] * len(engines)
            options = [replace(each, rank=None, chat=None) for each in options]
        judge = judge_of(plan.scores, result.results, engines, options, self.submitter, result.scores)
        return Scoring(plan.scores, result.scores, judge, self._keep_scores)

    def _keep_scores(self, position: int) -> None:
        answer = self.result[position]
        self.recorder.keep_scores(answer, self.result.scores.found_of(position, len(answer.outputs)))

    def mark(self, answer: GenerationResult, *, pinned: bool | None = None, thumb: int | None = None) -> None:
        """Note in the kept run of an answer what a person thinks of it; a thumb needs none where no runs are kept.

        Raises:
            NBEngineError: no run is kept of it, or cannot be written.
        """
        if not self.recorder.is_on:
            if pinned is not None:
                raise NBEngineError("no runs are kept (`NBEngine.keep_runs` is off)")
            return
        self.recorder.mark(answer, pinned=pinned, thumb=thumb)


def begin_comparison(
    shell: InteractiveShell,
    comparison: Comparison,
    submitter: Submitter,
    recorder: Recorder,
    on_sent: Callable[[int, Request], None],
    *,
    foreground: bool,
) -> ComparisonRun:
    """Send the first requests of a comparison, as many as its engines take, and make the stream of all of them.

    Raises:
        UsageError: a request is not possible.
        NBEngineError: all requests were refused, or the kept runs cannot be read.
    """
    plan, engines = comparison.plan, comparison.engines
    combinations = plan.combinations
    params = [
        submitter.params(engine, each.options) for engine, each in zip(engines, combinations, strict=True)
    ]
    blank = [GenerationResult("", each.options.prompt) for each in combinations]
    result = ComparisonResult(
        plan.axes,
        [each.settings for each in combinations],
        blank,
        num_each=plan.num_each,
        scores=plan.scores.names,
    )
    if plan.resumes:
        _take_kept(comparison, result, submitter, recorder)

    deeds = ComparisonDeeds(comparison, result, submitter, recorder)
    sender = Sender(result, engines, deeds.prepare, on_sent, foreground=foreground, retries=plan.retries)
    unanswered = [position for position, found in enumerate(result) if not found.finished]
    if unanswered:
        # What is wrong with the line is wrong with all its requests: nothing is sent then.
        deeds.prepare(unanswered[0])
    try:
        sender.fill()
        view = grid_view(shell, plan, params, result, submitter.views, deeds)
    except BaseException:
        sender.abandon()
        raise
    if len(result.errors) == len(result):
        raise next(iter(result.errors.values()))
    scoring = deeds.scoring(background=not foreground)
    return ComparisonRun(result, sender, view, engines, scoring, submitter.stops)


def _take_kept(
    comparison: Comparison, result: ComparisonResult, submitter: Submitter, recorder: Recorder
) -> None:
    """Put the answers of kept runs into the results of the same questions, and say how many there are.

    Raises:
        UsageError: runs are not kept, or the engine cannot do what a flag asks for.
        NBEngineError: the kept runs cannot be read.
    """
    if not recorder.is_on:
        raise UsageError("%%generate: --resume: no runs are kept (`NBEngine.keep_runs` is off)")
    recorder.close()
    questions = [
        submitter.question(engine, each.options, comparison.occasion(position))
        for position, (engine, each) in enumerate(
            zip(comparison.engines, comparison.plan.combinations, strict=True)
        )
    ]
    kept = kept_by_position(questions, recorder.writer.store.answers_to(questions))
    for position, run in kept.items():
        result.results[position].restore(run)
        if run["thumb"]:
            result.thumbs[position] = run["thumb"]
        result.scores.restore(position, run)
        if run["pinned"]:
            result.pinned.add(position)
        result.results[position].is_json = comparison.plan.combinations[position].options.parse_json
    print_quietly(f"{len(kept):,} of {count(len(result), 'answer')} have been kept; the others are asked")
