"""A wave timeline as a picture: each engine core is a row, time goes from left to right.

Text takes the colour of its surroundings; everything else has the colour that it has in the dashboard.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate, pairwise

from nbengine.widgets.dashboard.palette import ROLES
from nbengine.widgets.svg import LINE, PAGE_STYLE, STANDALONE_SHEET, Drawing, Rect
from nbengine.widgets.waves.timeline import RankSpan, WaveTimeline
from nbengine.widgets.waves.timeline_text import moment, summary, totals

WIDTH = 760.0
_PAD = 8.0
_LEFT = 76.0
_BAR = 26.0
"""The height of a rank's bar."""
_CURVE = 16.0
"""The height of the curve of the rank's requests, below."""
_COLUMNS = 330
_SMALLEST_MARK = 34.0
"""The width that a wave needs for its number."""
_TICKS = 5
_ROUNDING = 1e-6
"""Sums of shares are less than the whole by no more than this."""
_STEP_ROLES = ("decode", "prefill", "recompute", "dummy")
"""The colours of steps, from below: one that does several of these things has the last of them."""


def draw(timeline: WaveTimeline, *, standalone: bool = False) -> str:
    """Draw the picture as SVG; `standalone` gives it its own ground and text colour."""
    return _Picture(timeline).render(standalone=standalone)


def page_part(timeline: WaveTimeline) -> str:
    """Draw the picture for a page, with the text below it for readers who cannot see or want to copy it."""
    return (
        f'<div style="font-size:0">{draw(timeline)}</div><details><summary>as text</summary>'
        f'<pre style="margin:0;overflow-x:auto;white-space:pre">{escape(str(timeline))}</pre></details>'
    )


class _Picture:
    """A drawing of the timeline, laid out from top to bottom; `_y` is how far down it has come."""

    def __init__(self, timeline: WaveTimeline) -> None:
        self._timeline = timeline
        self._drawing = Drawing()
        self._y = 1.0
        self._right = WIDTH - _PAD
        most = max((timeline.total(rank).num_requests for rank in timeline.ranks), default=0)
        self._most_requests = max(1, most)

    def render(self, *, standalone: bool) -> str:
        """Draw the whole picture."""
        timeline, drawing = self._timeline, self._drawing
        drawing.text(_PAD, self._y + 12, summary(timeline), width=WIDTH - 2 * _PAD, bold=True)
        self._y += LINE + _PAD
        if timeline.spans:
            if timeline.lock_step:
                self._waves()
            for rank in timeline.ranks:
                self._rank(rank)
            self._axis()
            self._legend()
        style, sheet = ("", STANDALONE_SHEET) if standalone else (PAGE_STYLE, "")
        return drawing.render(WIDTH, self._y, summary(timeline), str(timeline), style=style, sheet=sheet)

    def _x(self, seconds: float) -> float:
        return _LEFT + (self._right - _LEFT) * seconds / self._timeline.seconds

    def _waves(self) -> None:
        drawing = self._drawing
        drawing.text(_PAD, self._y + 12, "waves", width=_LEFT - _PAD, muted=True)
        for wave in self._timeline.waves:
            left, right = self._x(wave.start), self._x(wave.end)
            drawing.open_group(f"wave {wave.number}: {wave.start:.2f} s to {wave.end:.2f} s")
            drawing.bar(
                Rect(left, self._y + 2, max(1.0, right - left - 1), LINE - 4), ROLES["running"], opacity=0.18
            )
            drawing.close_group()
            if right - left >= _SMALLEST_MARK:
                drawing.text(left + 4, self._y + 12, str(wave.number), width=right - left - 4)
        self._y += LINE + 4

    def _rank(self, rank: int) -> None:
        drawing, top = self._drawing, self._y
        drawing.text(_PAD, top + 17, f"rank {rank}", width=_LEFT - _PAD, bold=True)
        columns = list(self._timeline.columns(rank, _COLUMNS))
        width = (self._right - _LEFT) / _COLUMNS
        drawing.open_group(f"rank {rank}: {totals(self._timeline, rank)}", rank=rank)
        start = 0
        for index in range(1, _COLUMNS + 1):
            if index == _COLUMNS or _look(columns[index]) != _look(columns[start]):
                place = Rect(_LEFT + start * width, top, (index - start) * width, _BAR)
                self._bar(place, columns[start])
                start = index
        self._curve(columns, top + _BAR + 2)
        drawing.close_group()
        text = totals(self._timeline, rank)
        self._y = top + _BAR + _CURVE + 4
        drawing.text(self._right, self._y + 10, text, width=WIDTH, anchor="end", muted=True)
        self._y += LINE + 2

    def _bar(self, place: Rect, state: RankSpan | None) -> None:
        """Draw the kinds of steps above each other, by their shares; a middle line if nothing runs."""
        kind, tenths = _look(state)
        if kind == "paused":
            self._drawing.bar(Rect(place.x, place.middle - 1, place.width, 2), ROLES["free"], opacity=0.7)
        bottom = place.bottom
        for role, share in zip(_STEP_ROLES, tenths, strict=False):
            height = place.height * share / 10
            bottom -= height
            if share:
                self._drawing.bar(Rect(place.x, bottom, place.width, height), ROLES[role], opacity=0.9)

    def _curve(self, columns: list[RankSpan | None], top: float) -> None:
        """Draw the requests that wait above those that run, as areas, and a tick at each preemption."""
        width = (self._right - _LEFT) / _COLUMNS
        foot = top + _CURVE - 2
        running, waiting, preempted = [], [], []
        num_preempted, num_told = _ROUNDING, 0
        for index, state in enumerate(columns):
            x = _LEFT + (index + 0.5) * width
            if state is None:
                continue
            unit = (_CURVE - 3) / self._most_requests
            below = (state.num_requests - state.num_waiting) * unit
            if below:
                running.append((x, foot, below))
            if state.num_waiting:
                waiting.append((x, foot - below, state.num_waiting * unit))
            # A report tells only how many there were in its time: each has its tick once it must have come.
            num_preempted += state.preemptions
            if num_preempted >= num_told + 1:
                num_told = int(num_preempted)
                preempted.append((x, top - 2, _BAR))
        for color, drawn in (("running", running), ("waiting", waiting), ("preempted", preempted)):
            self._drawing.columns(drawn, ROLES[color], thickness=width)

    def _axis(self) -> None:
        for tick in range(_TICKS + 1):
            share = tick / _TICKS
            anchor = "start" if tick == 0 else "end" if tick == _TICKS else "middle"
            self._drawing.text(
                self._x(self._timeline.seconds * share),
                self._y + 12,
                moment(self._timeline, share),
                width=80,
                anchor=anchor,
                muted=True,
            )
        self._y += LINE + _PAD

    def _legend(self) -> None:
        """Name the colours: those of the steps, and in a line of their own those of the areas below the bars."""
        totals = [self._timeline.total(rank) for rank in self._timeline.ranks]
        steps = [("decode", "decode steps", 105.0)]
        if any(total.prefill_steps for total in totals):
            steps.append(("prefill", "with prefill", 105.0))
        if any(total.recompute_steps for total in totals):
            steps.append(("recompute", "with recomputation", 145.0))
        if self._timeline.lock_step:
            steps.append(("dummy", "dummy steps", 105.0))
        x = self._swatches(steps)
        self._drawing.bar(Rect(x, self._y + 7, 12, 2), ROLES["free"], opacity=0.7)
        name = "paused" if self._timeline.lock_step else "idle"
        self._drawing.text(x + 18, self._y + 12, name, width=60, muted=True)
        self._y += LINE
        requests = [("running", "requests that run", 140.0)]
        if any(total.num_waiting for total in totals):
            requests.append(("waiting", "that wait", 85.0))
        if any(total.preemptions for total in totals):
            requests.append(("preempted", "preempted", 85.0))
        x = self._swatches(requests)
        text = f"areas up to {self._most_requests} high"
        self._drawing.text(x, self._y + 12, text, width=self._right - x, muted=True)
        self._y += LINE + _PAD

    def _swatches(self, parts: Sequence[tuple[str, str, float]]) -> float:
        """Draw role, name and width of each part side by side, and return where the next one goes."""
        x = _LEFT
        for role, name, width in parts:
            self._drawing.bar(Rect(x, self._y + 2, 12, 12), ROLES[role], opacity=0.9)
            self._drawing.text(x + 18, self._y + 12, name, width=width, muted=True)
            x += 18 + width
        return x


def _look(state: RankSpan | None) -> tuple[str, tuple[int, ...]]:
    """Return the look of a moment: a kind, and the tenths of its steps of each of `_STEP_ROLES`."""
    if state is None:
        return "absent", ()
    total = state.steps + state.dummy_steps
    if not total:
        return "paused", ()
    rounded = [0, *(round(10 * end / total) for end in accumulate(state.by_phase))]
    return "running", tuple(end - start for start, end in pairwise(rounded))
