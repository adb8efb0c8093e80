"""The step timeline as a picture: each step is a column, each request a row."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from nbengine.client.observe.process_usage import printable
from nbengine.client.observe.trace_mirror import TraceMirror
from nbengine.widgets.dashboard.palette import ROLES, request_color
from nbengine.widgets.dashboard.step_frames import DECODE, PROMPT, RECOMPUTED
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.figures import mirrors
from nbengine.widgets.pictures.steps import StepGrid, StepRow, grid_of, summary
from nbengine.widgets.pictures.svg_parts import (
    CROSS,
    DIAMOND,
    PAD,
    SMALL_GAP,
    STOP,
    WIDTH,
    LegendEntry,
    finish,
    legend,
)
from nbengine.widgets.svg import LINE, Drawing, Rect

MAX_STEPS = (200, 120, 60, 30)
"""The numbers of steps that are tried, until the picture is no longer than `MAX_LENGTH`."""
MAX_LENGTH = 32_000
MAX_ROWS = 20
"""The most rows of all engine cores together."""
_LEFT = 152.0
_ROW = 15.0
_BAR = 11.0
_WIDEST = 12.0
_COLORS = {PROMPT: ROLES["prefill"], DECODE: ROLES["decode"], RECOMPUTED: ROLES["recompute"]}
_HEIGHTS = {PROMPT: _BAR, DECODE: _BAR / 2, RECOMPUTED: _BAR}


def draw_steps(state: DashboardState, *, standalone: bool) -> str:
    """Draw the last steps of all engine cores that are drawn."""
    for max_steps in MAX_STEPS:
        svg = _draw(state, max_steps, standalone=standalone)
        if len(svg) <= MAX_LENGTH:
            break
    return svg


def _draw(state: DashboardState, max_steps: int, *, standalone: bool) -> str:
    drawing = Drawing()
    shown, note = mirrors(state)
    y = 1.0
    words = []
    for rank, mirror in shown:
        grid = grid_of(mirror, max_steps, MAX_ROWS // len(shown))
        prefix = f"rank {rank}: " if len(state.mirrors) > 1 else ""
        words.append(prefix + summary(grid))
        drawing.text(PAD, y + 12, words[-1], width=WIDTH - 2 * PAD, bold=True)
        y = _Timeline(drawing, mirror, grid, y + LINE + 6).paint()
    if note:
        drawing.text(PAD, y + 12, note, width=WIDTH - 2 * PAD, muted=True)
        y += LINE
    y = legend(drawing, _entries(), y + 2, PAD, WIDTH - PAD)
    return finish(drawing, y, "step timeline", "\n".join(words), standalone=standalone)


class _Timeline:
    """A painter of one engine core's grid."""

    def __init__(self, drawing: Drawing, mirror: TraceMirror, grid: StepGrid, top: float) -> None:
        self._drawing = drawing
        self._mirror = mirror
        self._grid = grid
        self._top = top
        self._width = min(_WIDEST, (WIDTH - PAD - _LEFT) / max(1, len(grid.steps)))

    def paint(self) -> float:
        """Paint the grid, and return the height below it."""
        rows = self._grid.rows
        for index, row in enumerate(rows):
            self._row(row, self._top + index * _ROW)
        y = self._top + len(rows) * _ROW
        if self._grid.num_more:
            drawing_text = f"… and {self._grid.num_more:,} more"
            self._drawing.text(PAD, y + 12, drawing_text, width=_LEFT - PAD, muted=True)
            y += LINE
        return y + SMALL_GAP

    def _row(self, row: StepRow, y: float) -> None:
        drawing, number = self._drawing, row.number
        request = self._mirror.requests.get(number) or self._mirror.finished.get(number)
        name = "" if request is None else printable(request.added.request_id)
        drawing.open_group(f"#{number} {name}".rstrip(), number=number)
        drawing.bar(Rect(PAD, y + 1, 9, 9), request_color(number), opacity=1)
        drawing.text(PAD + 15, y + 10, f"#{number} {name}", width=_LEFT - PAD - 23)
        middle = y + _BAR / 2
        for kind in (PROMPT, RECOMPUTED, DECODE):
            self._bars(row, kind, middle)
        drawing.marks(
            ((self._x(column), middle) for column in row.preempted), CROSS, ROLES["preempted"], filled=False
        )
        drawing.marks(((self._x(column), middle) for column in row.hits), DIAMOND, ROLES["hit"], filled=True)
        if row.finished is not None:
            drawing.marks([(self._x(row.finished + 1), middle)], STOP, "currentColor", filled=False)
        drawing.close_group()

    def _bars(self, row: StepRow, kind: int, middle: float) -> None:
        """Paint the steps of a kind; adjacent ones are one dashed stroke; colour and height tell the kind."""
        gap = 1.0 if self._width >= 5 else 0.6
        height = _HEIGHTS[kind]
        y = middle + (_BAR - height) / 2
        runs = (
            (self._x(start), y, length * self._width - gap) for start, length in _stretches(row.kinds, kind)
        )
        self._drawing.runs(runs, _COLORS[kind], thickness=height, dash=(self._width - gap, gap))

    def _x(self, column: int) -> float:
        return _LEFT + column * self._width


def _stretches(kinds: tuple[int | None, ...], kind: int) -> Iterable[tuple[int, int]]:
    """Find (first column, length) of each stretch of a kind."""
    start = 0
    for value, group in groupby(kinds):
        length = sum(1 for _ in group)
        if value == kind:
            yield start, length
        start += length


def _entries() -> list[LegendEntry]:
    return [
        LegendEntry(ROLES["prefill"], "prefill"),
        LegendEntry(ROLES["decode"], "decode", low=True),
        LegendEntry(ROLES["recompute"], "again, after a preemption"),
        LegendEntry(ROLES["hit"], "prefix hit", shape=DIAMOND),
        LegendEntry(ROLES["preempted"], "preempted", shape=CROSS),
        LegendEntry("currentColor", "ended", shape=STOP),
    ]
