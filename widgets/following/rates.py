"""The rates of an engine, measured from the steps and requests that were published in the last seconds."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from nbengine.client.observe.trace_mirror import RequestView, StepView, TraceMirror
from nbengine.metrics.stats import EngineStats
from nbengine.widgets.following.dashboard_state import Rates

WINDOW = 5.0
"""Seconds over which tokens, and the times between them, are measured."""
FIRST_TOKEN_WINDOW = 60.0
"""Seconds over which times to the first token are measured: there is only one for each request."""
SHORTEST = 0.5
"""Seconds that an engine must have been followed before a rate means anything."""
_MOST_REQUESTS = 4096
_SECONDS = attrgetter("seconds")


class RateMeter:
    """A meter of one engine, all its engine cores together, for one thread."""

    def __init__(self) -> None:
        self._ranks: dict[int, _RankMeter] = {}

    def take(self, mirrors: Mapping[int, TraceMirror]) -> None:
        """Take in what is new in the mirrors; the calls must come before the mirrors forget their steps."""
        for rank in self._ranks.keys() - mirrors.keys():
            del self._ranks[rank]
        for rank, mirror in mirrors.items():
            if mirror.seq is not None:
                self._ranks.setdefault(rank, _RankMeter()).take(mirror)

    def rates(self, stats: EngineStats, now: float) -> Rates:
        """Return the figures at `now`, seconds of `time.time()` on the engine's machine."""
        meters = list(self._ranks.values())
        for meter in meters:
            meter.forget(now)
        memory = sum(worker.memory_bytes for engine in stats.engines for worker in engine.workers)
        known = [meter for meter in meters if now - meter.began >= SHORTEST]
        first_token = _percentiles([item for meter in meters for item in meter.first_tokens])
        between = _percentiles([item for meter in meters for item in meter.gaps])
        return Rates(
            tokens_in_per_second=_sum(meter.tokens_per_second(0, now) for meter in known),
            tokens_out_per_second=_sum(meter.tokens_per_second(1, now) for meter in known),
            time_to_first_token=first_token[0],
            inter_token_latency=between[0],
            memory_bytes=memory or None,
            first_token_tail=first_token[1:],
            inter_token_tail=between[1:],
        )


@dataclass(frozen=True, slots=True)
class _Measured:
    """A number (`weight`) of durations of `seconds` each, which ended at `time`."""

    time: float
    seconds: float
    weight: int = 1


@dataclass(slots=True)
class _RankMeter:
    began: float = 0.0
    tokens: deque[tuple[float, int, int]] = field(default_factory=deque)
    """(time, computed tokens of prompts, sampled tokens)."""
    gaps: deque[_Measured] = field(default_factory=deque)
    first_tokens: deque[_Measured] = field(default_factory=deque)
    _source: tuple[TraceMirror, int] | None = None
    """The mirror and its number of snapshots; a change of either breaks the measurement off."""
    _newest: StepView | None = None
    """The last step that was taken in."""
    _group: tuple[Sequence[int], float] = ((), 0.0)
    """The requests of that step, and the time when it was done."""
    _last_tokens: dict[int, float] = field(default_factory=dict)
    """The time of the last token of each request that is not in the group."""
    _first_tokens_until: float = 0.0

    def take(self, mirror: TraceMirror) -> None:
        source = (mirror, mirror.num_snapshots)
        if source != self._source:
            self._start(mirror)
            self._source = source
        has_prompts = False
        for step in self._new_steps(mirror):
            if step.seconds is None:
                break
            self._take_step(step, step.time + step.seconds)
            has_prompts = has_prompts or bool(step.prefills)
        if has_prompts:
            self._take_first_tokens(mirror)
        if len(self._last_tokens) > _MOST_REQUESTS:
            self._last_tokens = {
                number: when for number, when in self._last_tokens.items() if number in mirror.requests
            }

    def tokens_per_second(self, index: int, now: float) -> float:
        """Return the rate of prompt tokens (`index` 0) or of sampled tokens (1)."""
        return sum([item[1 + index] for item in self.tokens]) / min(WINDOW, now - self.began)

    def forget(self, now: float) -> None:
        """Drop what is older than the windows."""
        while self.tokens and self.tokens[0][0] <= now - WINDOW:
            self.tokens.popleft()
        for measured, window in ((self.gaps, WINDOW), (self.first_tokens, FIRST_TOKEN_WINDOW)):
            while measured and measured[0].time <= now - window:
                measured.popleft()

    def _start(self, mirror: TraceMirror) -> None:
        self.began = mirror.time
        self.tokens.clear()
        # The steps before the snapshot may never be completed.
        self._newest = mirror.steps[-1] if mirror.steps else None
        self._group = ((), 0.0)
        self._last_tokens.clear()
        self._first_tokens_until = mirror.time

    def _new_steps(self, mirror: TraceMirror) -> list[StepView]:
        newest = self._newest
        new = list(itertools.takewhile(lambda step: step is not newest, reversed(mirror.steps)))
        return new[::-1]

    def _take_step(self, step: StepView, done: float) -> None:
        self._newest = step
        self.tokens.append((done, step.num_prefill_tokens, step.num_sampled))
        numbers, before = self._group
        if not step.prefills and (step.numbers is numbers or list(step.numbers) == list(numbers)):
            if numbers:
                self.gaps.append(_Measured(done, done - before, len(numbers)))
        else:
            self._last_tokens.update(dict.fromkeys(numbers, before))
            prefills = set(step.prefills)
            for number in step.numbers:
                last = self._last_tokens.pop(number, None)
                if last is not None and number not in prefills:
                    self.gaps.append(_Measured(done, done - last))
        self._group = (step.numbers, done)

    def _take_first_tokens(self, mirror: TraceMirror) -> None:
        until = self._first_tokens_until
        ended = itertools.takewhile(
            lambda request: (request.ended_at or 0.0) >= until, reversed(mirror.finished.values())
        )
        for request in itertools.chain(ended, mirror.requests.values()):
            self._take_first_token(request, until)
        self.first_tokens = deque(sorted(self.first_tokens, key=lambda item: item.time))

    def _take_first_token(self, request: RequestView, until: float) -> None:
        first = request.first_token_at
        if first is not None and first > until:
            self.first_tokens.append(_Measured(first, first - request.added.time))
            self._first_tokens_until = max(self._first_tokens_until, first)


def _sum(values: Iterable[float]) -> float | None:
    known = list(values)
    return sum(known) if known else None


def _percentiles(items: Sequence[_Measured]) -> tuple[float | None, float | None, float | None]:
    """Return the median, the 95th and the 99th percentile; None each where nothing was measured.

    Each is the least measured duration that at least that share of them does not exceed.
    """
    ordered = sorted(items, key=_SECONDS)
    weights = list(itertools.accumulate([item.weight for item in ordered]))
    if not weights:
        return None, None, None
    middle, high, highest = (
        ordered[bisect_left(weights, part * weights[-1] / 100)].seconds for part in (50, 95, 99)
    )
    return middle, high, highest
