"""The scheduler as a picture: the requests that run and wait over time, and each step's token budget."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.client.observe.trace_mirror import StepView
from nbengine.widgets.dashboard.palette import ROLES
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.figures import mirrors
from nbengine.widgets.pictures.loads import Loads, budget_title, loads_of
from nbengine.widgets.pictures.steps import last_steps
from nbengine.widgets.pictures.svg_parts import CROSS, PAD, SMALL_GAP, WIDTH, LegendEntry, finish, legend
from nbengine.widgets.svg import LINE, Drawing, Rect

COLUMNS = 120
"""The columns of the first chart; half as many where there are several engine cores."""
MAX_STEPS = 200
"""The most steps of all engine cores together."""
HEIGHT = 64.0
"""The height of a chart."""
_GAP = 24.0
_CHART = (WIDTH - 2 * PAD - _GAP) / 2
_WIDEST = 12.0
_CROSSES = 8.0
"""The height above the bars for the crosses."""


def draw_scheduler(state: DashboardState, *, standalone: bool) -> str:
    """Draw both charts of all engine cores that are drawn."""
    drawing = Drawing()
    shown, note = mirrors(state)
    y = 1.0
    words = []
    for rank, mirror in shown:
        prefix = f"rank {rank}: " if len(state.mirrors) > 1 else ""
        loads = loads_of(mirror, COLUMNS if len(shown) == 1 else COLUMNS // 2)
        steps = last_steps(mirror, MAX_STEPS // len(shown))
        words.append(f"{prefix}{loads.title}; {budget_title(steps)}")
        left = _loads(drawing, loads, prefix, y)
        right = _budget(drawing, mirror.max_num_batched_tokens, steps, y)
        y = max(left, right)
    if note:
        drawing.text(PAD, y + 12, note, width=WIDTH - 2 * PAD, muted=True)
        y += LINE + SMALL_GAP
    return finish(drawing, y, "scheduler", "\n".join(words), standalone=standalone)


def _loads(drawing: Drawing, loads: Loads, prefix: str, y: float) -> float:
    """Draw waiting requests upon running ones, and crosses where some were preempted."""
    foot = _frame(drawing, prefix + loads.title, PAD, y)
    width = _CHART / max(1, len(loads.running))
    places = [PAD + (column + 0.5) * width for column in range(len(loads.running))]
    known = [
        (x, run, wait)
        for x, run, wait in zip(places, loads.running, loads.waiting, strict=True)
        if run is not None and wait is not None
    ]
    _stacked(drawing, known, ("running", "waiting"), foot, width, most=0)
    crosses = [(x, foot - HEIGHT + 2) for x, times in zip(places, loads.preempted, strict=True) if times]
    drawing.marks(crosses, CROSS, ROLES["preempted"], filled=False)
    entries = [
        LegendEntry(ROLES["running"], _up_to("running", [run for _, run, _ in known])),
        LegendEntry(ROLES["waiting"], _up_to("waiting", [wait for _, _, wait in known])),
        LegendEntry(ROLES["preempted"], f"preempted {sum(loads.preempted):,}×", shape=CROSS),
    ]
    return legend(drawing, entries, foot + 5, PAD, PAD + _CHART)


def _budget(drawing: Drawing, budget: int, steps: Sequence[StepView], y: float) -> float:
    """Draw tokens of prompts upon those of decodes, and a line at the budget, if it is not far above."""
    left = PAD + _CHART + _GAP
    foot = _frame(drawing, budget_title(steps), left, y)
    width = min(_WIDEST, _CHART / max(1, len(steps)))
    bars = [
        (left + (index + 0.5) * width, step.num_decode_tokens, step.num_prefill_tokens)
        for index, step in enumerate(steps)
    ]
    most = max((decode + prefill for _, decode, prefill in bars), default=0)
    shows_budget = 0 < budget <= 2 * most
    _stacked(drawing, bars, ("decode", "prefill"), foot, width, most=budget if shows_budget else 0)
    if shows_budget:
        level = foot - _scale(max(budget, most)) * budget
        drawing.line((left, level), (left + _CHART, level), dashed=True)
    entries = [
        LegendEntry(ROLES["prefill"], _up_to("prefill", [prefill for _, _, prefill in bars])),
        LegendEntry(ROLES["decode"], _up_to("decode", [decode for _, decode, _ in bars])),
        LegendEntry("", f"budget {budget:,}" if budget else "budget –"),
    ]
    return legend(drawing, entries, foot + 5, left, left + _CHART)


def _frame(drawing: Drawing, title: str, left: float, y: float) -> float:
    """Draw the title and the ground line, and return the line's height."""
    drawing.text(left, y + 12, title, width=_CHART, bold=True)
    foot = y + LINE + 4 + HEIGHT
    drawing.bar(Rect(left, foot, _CHART, 1), "currentColor", opacity=0.4)
    return foot


def _stacked(
    drawing: Drawing,
    bars: Sequence[tuple[float, int, int]],
    roles: tuple[str, str],
    foot: float,
    width: float,
    *,
    most: int,
) -> None:
    """Draw (x, lower part, upper part) as columns; `most` is the least value that has to fit."""
    scale = _scale(max(most, max((lower + upper for _, lower, upper in bars), default=0)))
    lower_bars = ((x, foot, lower * scale) for x, lower, _ in bars if lower)
    upper_bars = ((x, foot - lower * scale, upper * scale) for x, lower, upper in bars if upper)
    for role, columns in zip(roles, (lower_bars, upper_bars), strict=True):
        drawing.open_group(role, role=role)
        drawing.columns(columns, ROLES[role], thickness=width)
        drawing.close_group()


def _scale(most: int) -> float:
    return (HEIGHT - _CROSSES) / max(1, most)


def _up_to(name: str, values: Sequence[int]) -> str:
    return f"{name} ≤ {max(values):,}" if values else name
