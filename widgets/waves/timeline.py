"""What each engine core did over time: steps, dummy steps and pauses, wave by wave. Made from the coordinator's snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from nbengine.metrics.stats import EngineStats, SchedulerStats


@dataclass(frozen=True, slots=True)
class RankSpan:
    """One engine core between two snapshots."""

    steps: float = 0.0
    """With work of its own; a share of them where a span is a part of a longer one."""
    dummy_steps: float = 0.0
    """In lock step: without, for the others' sake."""
    wave: int = 0
    is_running: bool = False
    """In lock step: a wave runs; else: there are requests."""
    num_requests: int = 0
    """Running and waiting, at the end."""


@dataclass(frozen=True, slots=True)
class Span:
    """The time between two snapshots, in seconds since the start of the recording, and the engine cores that there were
    by rank."""

    start: float
    end: float
    ranks: dict[int, RankSpan]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class WaveSpan:
    """A wave, as far as it was seen."""

    number: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class WaveTimeline:
    """A recording. `str(timeline)` is a timeline of text, `timeline.svg()` a picture; a notebook shows the picture."""

    engine: str
    lock_step: bool
    """Whether the engine cores step together; otherwise there are no waves and no dummy steps."""
    spans: tuple[Span, ...] = ()
    began: float = 0.0
    """`time.time()` of its start."""

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.spans[-1].end if self.spans else 0.0

    @property
    def ranks(self) -> list[int]:
        """The engine cores that have been there."""
        return sorted({rank for span in self.spans for rank in span.ranks})

    @property
    def waves(self) -> list[WaveSpan]:
        """The waves that ran, in their order."""
        waves: dict[int, WaveSpan] = {}
        for span in self.spans if self.lock_step else ():
            running = [state.wave for state in span.ranks.values() if state.is_running]
            if running:
                number = max(running)
                first = waves.get(number)
                waves[number] = WaveSpan(number, span.start if first is None else first.start, span.end)
        return list(waves.values())

    def total(self, rank: int) -> RankSpan:
        """What an engine core did in all of it; `num_requests` is the most it had at a time."""
        states = [span.ranks[rank] for span in self.spans if rank in span.ranks]
        return RankSpan(
            sum(state.steps for state in states),
            sum(state.dummy_steps for state in states),
            max((state.wave for state in states), default=0),
            any(state.is_running for state in states),
            max((state.num_requests for state in states), default=0),
        )

    def columns(self, rank: int, count: int) -> Iterator[RankSpan | None]:
        """An engine core's part in so many spans of equal length; None where there was no such core."""
        length = self.seconds / count
        first = 0
        for number in range(count):
            start, end = number * length, (number + 1) * length
            while first < len(self.spans) - 1 and self.spans[first].end <= start:
                first += 1
            yield _merged(self.spans, first, rank, start, end)

    def svg(self) -> str:
        """A picture that stands by itself, as in a file: on a ground of its own, dark where the reader's system is."""
        from nbengine.widgets.waves.timeline_svg import draw

        return draw(self, standalone=True)

    def html(self) -> str:
        """The picture in the colours of the page that it is put in, and the text, folded."""
        from nbengine.widgets.waves.timeline_svg import page_part

        return page_part(self)

    def __str__(self) -> str:
        from nbengine.widgets.waves.timeline_text import text_timeline

        return text_timeline(self)

    def bundle(self) -> dict[str, str]:
        """All its forms, by MIME type."""
        return {"text/plain": str(self), "text/html": self.html(), "image/svg+xml": self.svg()}

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return self.bundle()


@dataclass
class WaveRecorder:
    """Makes a timeline from snapshots. What is published says how things stand: between two snapshots lies what the
    counters have grown by, in the state of the first one, because each change of state is published at once. Who has not
    read all that was published says so with `break_off`."""

    engine: str
    lock_step: bool
    keep: int | None = None
    """How many spans are kept, the latest; None: all."""
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
        """From here to the next snapshot nothing is known: some may be missed."""
        self._newest = None

    def timeline(self, now: float | None = None) -> WaveTimeline:
        """What there is; `now`, a `time.time()`, ends it later than the last snapshot, with nothing new."""
        spans = list(self._spans)
        newest = self._newest
        if newest is not None and now is not None and now > newest.timestamp:
            still = EngineStats(newest.engines, newest.current_wave, newest.engines_running, now)
            spans.append(self._span(newest, still))
        for rank in {rank for span in spans for rank in span.ranks}:
            _spread(spans, rank)
        start = spans[0].start if spans else 0.0
        if start:
            # Earlier ones are not kept.
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
                # The state that was published holds until the next one; what ranks report may be older.
                is_late = not (before.engines_running or after.engines_running)
                if is_late:
                    self._credit(rank, state, start)
                    state = replace(state, steps=0, dummy_steps=0)
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
        return RankSpan(steps, dummy_steps, 0, steps > 0 or had_requests, num_requests)

    def _credit(self, rank: int, late: RankSpan, start: float) -> None:
        """Steps that were reported when the wave was over belong to the last time that the rank was seen in one, if all
        between that and `start` is known."""
        if not late.steps + late.dummy_steps:
            return
        for index in range(len(self._spans) - 1, -1, -1):
            span = self._spans[index]
            if span.end != start:
                return
            start = span.start
            state = span.ranks.get(rank)
            if state is not None and state.is_running:
                more = replace(
                    state, steps=state.steps + late.steps, dummy_steps=state.dummy_steps + late.dummy_steps
                )
                self._spans[index] = replace(span, ranks={**span.ranks, rank: more})
                return


def _spread(spans: list[Span], rank: int) -> None:
    """Where a rank was running and had nothing new to report, what it reports next belongs to that time, too."""
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
            for number in whole:
                part, share = spans[number], spans[number].seconds / seconds
                mine = replace(
                    part.ranks[rank], steps=state.steps * share, dummy_steps=state.dummy_steps * share
                )
                spans[number] = replace(part, ranks={**part.ranks, rank: mine})
            silent = []


def _steps(engine: SchedulerStats) -> int:
    """Steps with tokens since the start of the engine core: its workers count them across waves."""
    if engine.workers:
        return max(worker.num_steps for worker in engine.workers)
    return engine.step_counter


def _growth(before: int, after: int) -> int:
    """How much a counter has grown; one that is less has begun anew."""
    return after - before if after >= before else after


def _merged(spans: Sequence[Span], first: int, rank: int, start: float, end: float) -> RankSpan | None:
    steps = dummy_steps = 0.0
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
        steps += part.steps * share
        dummy_steps += part.dummy_steps * share
        is_running = is_running or part.is_running
        state = part
    if state is None:
        return None
    return RankSpan(steps, dummy_steps, state.wave, is_running, state.num_requests)
