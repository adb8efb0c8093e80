"""An engine's last known steps as a Chrome trace: a JSON text that Perfetto and chrome://tracing open.

Each rank is a process. It has the rank's steps, on as many tracks as were in flight at once, counters, and a
track for each request with spans for what was done for it. Spans of one track never overlap: viewers drop
those that do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from nbengine.client.observe.trace_mirror import RequestView, StepView, TraceMirror
from nbengine.widgets.following.dashboard_state import DashboardState, EngineLabel

STEPS_TRACK = 0
"""The thread id of a rank's first track of steps; the other tracks follow, then requests by number."""

Event = dict[str, object]


@dataclass(frozen=True, slots=True)
class RankHistory:
    """An engine core's last steps at one moment, as far as they are known."""

    steps: Sequence[StepView]
    requests: Mapping[int, RequestView]
    """The requests by number."""


@dataclass(frozen=True, slots=True)
class EngineHistory:
    """The contents of a trace, a frozen copy: any thread can read it at any time."""

    label: EngineLabel
    time: float
    ranks: Mapping[int, RankHistory]


def history_of(state: DashboardState) -> EngineHistory:
    """Copy what a trace needs."""
    ranks = {rank: _rank_history(mirror) for rank, mirror in sorted(state.mirrors.items())}
    return EngineHistory(state.label, state.time, ranks)


def chrome_trace(history: EngineHistory) -> str:
    """Make the trace of all ranks; times are microseconds since the first event."""
    zero = min((rank.steps[0].time for rank in history.ranks.values() if rank.steps), default=history.time)
    events: list[Event] = []
    for number, rank in history.ranks.items():
        events += _RankTrace(number, rank, zero).events()
    document = {
        "displayTimeUnit": "ms",
        "otherData": {"engine": history.label.name, "model": history.label.model, "began": zero},
        "traceEvents": events,
    }
    return msgspec.json.encode(document).decode()


class _RankTrace:
    """The events of one engine core."""

    def __init__(self, rank: int, history: RankHistory, zero: float) -> None:
        self._rank = rank
        self._history = history
        self._zero = zero
        self._lanes = _lanes(history.steps)
        self._first_request = STEPS_TRACK + max(self._lanes, default=0) + 1
        self._kinds: dict[int, tuple[str, float, float, int]] = {}
        """The span that is open for a request: (name, begin, end, tokens)."""
        self._recomputing: set[int] = set()
        self._events: list[Event] = []

    def events(self) -> list[Event]:
        self._name("process_name", 0, f"engine core {self._rank}")
        for lane in range(self._first_request - STEPS_TRACK):
            self._name("thread_name", STEPS_TRACK + lane, f"steps {lane + 1}" if lane else "steps")
        seen: set[int] = set()
        for lane, step in zip(self._lanes, self._history.steps, strict=True):
            self._step(lane, step)
            seen.update(step.numbers, step.finished)
        for number in list(self._kinds):
            self._close(number)
        for number in sorted(seen):
            view = self._view(number)
            name = f"request {number}" if view is None else view.added.request_id
            self._name("thread_name", self._first_request + number, name)
        return self._events

    def _step(self, lane: int, step: StepView) -> None:
        end = _end_of(step)
        arguments = {
            "step": step.step,
            "requests": len(step.numbers),
            "prefill tokens": step.num_prefill_tokens,
            "decode tokens": step.num_decode_tokens,
            "preempted": list(step.preempted),
        }
        self._span("step", STEPS_TRACK + lane, step.time, end, arguments)
        self._counters(step)
        for number in step.preempted:
            self._close(number, step.time)
            self._open(number, "preempted", step.time, step.time, 0)
            self._recomputing.add(number)
        prefills, admitted = set(step.prefills), set(step.admitted)
        for number, tokens, computed in zip(step.numbers, step.num_tokens, step.num_computed, strict=True):
            if number in admitted:
                self._admit(number, step, computed)
            if number not in prefills:
                self._recomputing.discard(number)
                kind = "decode"
            else:
                kind = "recompute" if number in self._recomputing else "prefill"
            self._open(number, kind, step.time, end, tokens)
        for number in step.finished:
            self._end(number, end)

    def _admit(self, number: int, step: StepView, computed: int) -> None:
        view = self._view(number)
        if number not in step.resumed and view is not None:
            track = self._first_request + number
            self._span("waiting", track, max(view.added.time, self._zero), step.time, {})
        elif number in self._kinds:
            name, begin, _, tokens = self._kinds[number]
            self._kinds[number] = (name, begin, step.time, tokens)
        if computed:
            self._instant("prefix hit", number, step.time, {"tokens": computed})

    def _end(self, number: int, end: float) -> None:
        self._close(number)
        view = self._view(number)
        reason = None if view is None else view.finish_reason
        ended_at = end if view is None or view.ended_at is None else view.ended_at
        self._instant("finished", number, ended_at, {"reason": reason})

    def _open(self, number: int, kind: str, begin: float, end: float, tokens: int) -> None:
        """Begin a span of a request, or continue the one that is open."""
        known = self._kinds.get(number)
        if known is not None and known[0] == kind:
            self._kinds[number] = (kind, known[1], end, known[3] + tokens)
            return
        self._close(number, begin)
        self._kinds[number] = (kind, begin, end, tokens)

    def _close(self, number: int, before: float = math.inf) -> None:
        """End the open span of a request, at `before` at the latest.

        With several steps in flight, a step begins before the previous one has ended.
        """
        known = self._kinds.pop(number, None)
        if known is not None:
            name, begin, end, tokens = known
            arguments: Event = {"tokens": tokens} if tokens else {}
            self._span(name, self._first_request + number, begin, min(end, before), arguments)

    def _counters(self, step: StepView) -> None:
        counters = {
            "requests": {"running": step.num_running, "waiting": step.num_waiting},
            "free blocks": {"free": step.num_free_blocks},
            "tokens a step": {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens},
        }
        for name, values in counters.items():
            self._add(ph="C", name=name, ts=self._micros(step.time), args=values)

    def _span(self, name: str, track: int, begin: float, end: float, arguments: Event) -> None:
        start = self._micros(begin)
        length = max(0.0, round(self._micros(end) - start, 1))
        self._add(ph="X", name=name, cat="nbengine", ts=start, dur=length, tid=track, args=arguments)

    def _instant(self, name: str, number: int, moment: float, arguments: Event) -> None:
        track = self._first_request + number
        self._add(ph="i", name=name, ts=self._micros(moment), tid=track, s="t", args=arguments)

    def _name(self, kind: str, track: int, name: str) -> None:
        self._add(ph="M", name=kind, ts=0.0, tid=track, args={"name": name})

    def _add(self, **event: object) -> None:
        self._events.append({"pid": self._rank, "tid": STEPS_TRACK, **event})

    def _micros(self, moment: float) -> float:
        return round(max(0.0, moment - self._zero) * 1e6, 1)

    def _view(self, number: int) -> RequestView | None:
        return self._history.requests.get(number)


def _end_of(step: StepView) -> float:
    """Return the end of a step; one that is not done yet, or whose outcome was lost, has no length."""
    return step.time + (step.seconds or 0.0)


def _lanes(steps: Sequence[StepView]) -> list[int]:
    """Find for each step the first lane that is free when it begins."""
    lanes: list[int] = []
    ends: list[float] = []
    for step in steps:
        lane = next((lane for lane, end in enumerate(ends) if end <= step.time), len(ends))
        ends[lane : lane + 1] = [_end_of(step)]
        lanes.append(lane)
    return lanes


def _rank_history(mirror: TraceMirror) -> RankHistory:
    steps = list(mirror.steps)
    # Only unfinished steps and the newest one can still change: the others are shared, not copied.
    newest = len(steps) - 1
    steps = [
        copy.copy(step) if step.seconds is None or at == newest else step for at, step in enumerate(steps)
    ]
    unfinished = {number: copy.copy(view) for number, view in mirror.requests.items()}
    return RankHistory(steps, {**mirror.finished, **unfinished})
