"""The timeline of engine cores: steps, dummy steps and pauses, wave by wave, made from snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from nbengine.metrics.stats import EngineStats, SchedulerStats


@dataclass(frozen=True, slots=True)
class RankSpan:
    """One engine core between two snapshots."""

    steps: float = 0.0
    """The steps with tokens; where a span is a part of a longer one, a share of them."""
    dummy_steps: float = 0.0
    """The steps without tokens, which exist only in lock step, for the others' sake."""
    wave: int = 0
    is_running: bool = False
    """In lock step, a wave runs; otherwise, there are requests."""
    num_requests: int = 0
    """The requests that run and wait at the end of the span."""
    num_waiting: int = 0
    """Those of them that wait."""
    preemptions: float = 0.0
    """The requests that have lost their blocks; a share of them as of the steps."""
    prefill_steps: float = 0.0
    """Those of the steps in which a request read its prompt, and none read again."""
    recompute_steps: float = 0.0
    """Those of the steps in which a request read again what it had lost."""

    @property
    def by_phase(self) -> tuple[float, float, float, float]:
        """Divide the steps: decode alone, with prefill, with recomputation, dummy steps."""
        # The counts of a report may be of one step more or less than its steps.
        again = min(self.recompute_steps, self.steps)
        reading = min(self.prefill_steps, self.steps - again)
        return self.steps - reading - again, reading, again, self.dummy_steps


_STEPS = ("steps", "dummy_steps", "prefill_steps", "recompute_steps")
"""The counts that a report may bring later than the time in which the steps were made."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time between two snapshots, in seconds since the recording began, and its engine cores by rank."""

    start: float
    end: float
    ranks: dict[int, RankSpan]

    @property
    def seconds(self) -> float:
        """Return the seconds between the snapshots."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class WaveSpan:
    """A wave, as far as it was seen."""

    number: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WaveTimeline:
    """A recording; `str(timeline)` is a timeline of text, `timeline.svg()` a picture for notebooks."""

    engine: str
    lock_step: bool
    """The engine cores step together; otherwise there are no waves and no dummy steps."""
    spans: tuple[Span, ...] = ()
    began: float = 0.0
    """The `time.time()` of the start."""

    @property
    def seconds(self) -> float:
        """Return the seconds from the start to the end."""
        return self.spans[-1].end if self.spans else 0.0

    @property
    def ranks(self) -> list[int]:
        """List the ranks of all engine cores that were seen."""
        return sorted({rank for span in self.spans for rank in span.ranks})

    @property
    def waves(self) -> list[WaveSpan]:
        """List the waves that ran, in order."""
        waves: dict[int, WaveSpan] = {}
        for span in self.spans if self.lock_step else ():
            running = [state.wave for state in span.ranks.values() if state.is_running]
            if running:
                number = max(running)
                first = waves.get(number)
                waves[number] = WaveSpan(number, span.start if first is None else first.start, span.end)
        return list(waves.values())

    def total(self, rank: int) -> RankSpan:
        """Sum up what an engine core did, in whole steps; `num_requests` and `num_waiting` are the most at a time."""
        states = [span.ranks[rank] for span in self.spans if rank in span.ranks]
        return RankSpan(
            # Shares of a report come to a whole number again, but for the rounding of their sum.
            round(sum(state.steps for state in states)),
            round(sum(state.dummy_steps for state in states)),
            max((state.wave for state in states), default=0),
            any(state.is_running for state in states),
            max((state.num_requests for state in states), default=0),
            max((state.num_waiting for state in states), default=0),
            round(sum(state.preemptions for state in states)),
            round(sum(state.prefill_steps for state in states)),
            round(sum(state.recompute_steps for state in states)),
        )

    def columns(self, rank: int, count: int) -> Iterator[RankSpan | None]:
        """Divide an engine core's part into `count` equal spans; None where there was no such core."""
        length = self.seconds / count
        first = 0
        for number in range(count):
            start, end = number * length, (number + 1) * length
            while first < len(self.spans) - 1 and self.spans[first].end <= start:
                first += 1
            yield _merged(self.spans, first, rank, start, end)

    def svg(self) -> str:
        """Draw a picture that stands by itself, as in a file: on its own ground, dark in a dark system."""
        from nbengine.widgets.waves.timeline_svg import draw

        return draw(self, standalone=True)

    def html(self) -> str:
        """Render the picture in the colours of its page, and below it the text, folded."""
        from nbengine.widgets.waves.timeline_svg import page_part

        return page_part(self)

    def __str__(self) -> str:
        from nbengine.widgets.waves.timeline_text import text_timeline

        return text_timeline(self)

    def bundle(self) -> dict[str, str]:
        """Render all forms, by MIME type."""
        return {"text/plain": str(self), "text/html": self.html(), "image/svg+xml": self.svg()}

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return self.bundle()


@dataclass
class WaveRecorder:
    """A recorder that makes a timeline from snapshots.

    Each change of state is published at once. So between two snapshots the state was that of the first one,
    and the steps are the growth of the counters. A reader that has missed messages says so with `break_off`.
    """

    engine: str
    lock_step: bool
    keep: int | None = None
    """The number of spans that are kept, the latest; None: all."""
    _spans: list[Span] = field(default_factory=list)
    _newest: EngineStats | None = None
    _began: float = 0.0

    def take(self, stats: EngineStats) -> None:
        """Take in a snapshot; one that is no newer than the last is left out."""
        before = self._newest
        if before is None:
            if not self._spans:
                self._began = stats.timestamp
        elif stats.timestamp <= before.timestamp:
            return
        else:
            self._spans.append(self._span(before, stats))
            if self.keep is not None:
                del self._spans[: -self.keep]
        self._newest = stats

    def break_off(self) -> None:
        """Forget the last snapshot: nothing is known until the next one, since some may be missed."""
        self._newest = None

    def timeline(self, now: float | None = None) -> WaveTimeline:
        """Make the timeline; `now`, a `time.time()`, ends it after the last snapshot, with nothing new."""
        spans = list(self._spans)
        newest = self._newest
        if newest is not None and now is not None and now > newest.timestamp:
            still = EngineStats(newest.engines, newest.current_wave, newest.engines_running, now)
            spans.append(self._span(newest, still))
        for rank in {rank for span in spans for rank in span.ranks}:
            _spread(spans, rank)
        start = spans[0].start if spans else 0.0
        if start:
            # The start moves, since the oldest spans were dropped.
            spans = [replace(span, start=span.start - start, end=span.end - start) for span in spans]
        return WaveTimeline(self.engine, self.lock_step, tuple(spans), self._began + start)

    def _span(self, before: EngineStats, after: EngineStats) -> Span:
        known = {engine.engine_index: engine for engine in before.engines}
        start, end = before.timestamp - self._began, after.timestamp - self._began
        ranks = {}
        for engine in after.engines:
            rank = engine.engine_index
            state = self._state(known.get(rank, SchedulerStats(rank)), engine)
            if self.lock_step:
                # The published state holds until the next one; the counters that ranks report may be older.
                is_late = not (before.engines_running or after.engines_running)
                if is_late:
                    self._credit(rank, state, start)
                    state = _counted(state, dict.fromkeys(_STEPS, 0))
                running = before.engines_running or (
                    after.engines_running and state.steps + state.dummy_steps > 0
                )
                wave = (before if before.engines_running else after).current_wave
                state = replace(state, wave=wave, is_running=running)
            ranks[rank] = state
        return Span(start, end, ranks)

    def _state(self, known: SchedulerStats, engine: SchedulerStats) -> RankSpan:
        steps = _growth(_steps(known), _steps(engine))
        dummy_steps = _growth(known.num_dummy_steps, engine.num_dummy_steps)
        had_requests = known.num_running_reqs + known.num_waiting_reqs > 0
        num_requests = engine.num_running_reqs + engine.num_waiting_reqs
        return RankSpan(
            steps,
            dummy_steps,
            0,
            steps > 0 or had_requests,
            num_requests,
            engine.num_waiting_reqs,
            _growth(known.num_preemptions, engine.num_preemptions),
            _growth(known.num_prefill_steps, engine.num_prefill_steps),
            _growth(known.num_recompute_steps, engine.num_recompute_steps),
        )

    def _credit(self, rank: int, late: RankSpan, start: float) -> None:
        """Credit steps reported after the end of a wave to the last span in which the rank was in one.

        The steps are dropped if a part of the time between that span and `start` is unknown.
        """
        if not late.steps + late.dummy_steps:
            return
        for index in range(len(self._spans) - 1, -1, -1):
            span = self._spans[index]
            if span.end != start:
                return
            start = span.start
            state = span.ranks.get(rank)
            if state is not None and state.is_running:
                more = {name: getattr(state, name) + getattr(late, name) for name in _STEPS}
                self._spans[index] = replace(span, ranks={**span.ranks, rank: _counted(state, more)})
                return


def _spread(spans: list[Span], rank: int) -> None:
    """Spread a rank's report over the spans before it in which the rank ran without a report."""
    silent: list[int] = []
    for index, span in enumerate(spans):
        state = span.ranks.get(rank)
        if silent and spans[index - 1].end != span.start:
            silent = []
        if state is None or not state.is_running:
            silent = []
        elif state.steps + state.dummy_steps == 0:
            silent.append(index)
        elif silent:
            whole = [*silent, index]
            seconds = sum(spans[number].seconds for number in whole)
            states = [spans[number].ranks[rank] for number in whole]
            counts = {name: sum(getattr(each, name) for each in states) for name in _STEPS}
            for number in whole:
                part, share = spans[number], spans[number].seconds / seconds
                mine = {name: count * share for name, count in counts.items()}
                ranks = {**part.ranks, rank: _counted(part.ranks[rank], mine)}
                spans[number] = replace(part, ranks=ranks)
            silent = []


def _steps(engine: SchedulerStats) -> int:
    """Count the steps with tokens since the start of the engine core: its workers count them across waves."""
    if engine.workers:
        return max(worker.num_steps for worker in engine.workers)
    return engine.step_counter


def _counted(state: RankSpan, counts: Mapping[str, float]) -> RankSpan:
    """Return the state with other counts, by the names of their fields."""
    fields: dict[str, Any] = dict(counts)
    return replace(state, **fields)


def _growth(before: int, after: int) -> int:
    """Return how much a counter has grown; one that is less has begun again at 0."""
    return after - before if after >= before else after


def _merged(spans: Sequence[Span], first: int, rank: int, start: float, end: float) -> RankSpan | None:
    counts = dict.fromkeys((*_STEPS, "preemptions"), 0.0)
    state: RankSpan | None = None
    is_running = False
    for span in spans[first:]:
        if span.start >= end:
            break
        shared = min(end, span.end) - max(start, span.start)
        part = span.ranks.get(rank)
        if part is None or shared <= 0:
            continue
        share = shared / span.seconds
        for name in counts:
            counts[name] += getattr(part, name) * share
        is_running = is_running or part.is_running
        state = part
    if state is None:
        return None
    return replace(_counted(state, counts), is_running=is_running)
