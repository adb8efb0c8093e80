"""Line charts as SVG, several in one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nbengine.widgets.svg import FONT_SIZE, LINE, STANDALONE_SHEET, Drawing, Rect, text_width

COLORS = ("#3b82f6", "#2f9e6e", "#d9822b", "#e5484d", "#9b6dd6", "#8a8f98", "#12a5b5", "#b8860b")
_WIDTH, _HEIGHT = 470.0, 330.0
_LEFT, _TOP, _RIGHT = 58.0, 44.0, 14.0


@dataclass(frozen=True)
class Chart:
    """A line chart: a value for each place on the x axis, for each series; None where there is none."""

    title: str
    x_label: str
    y_label: str
    places: Sequence[object]
    series: Mapping[str, Sequence[float | None]]
    logarithmic: bool = False
    colors: Mapping[str, str] | None = None
    """The colours of series; the other series get the usual ones in turn."""


def draw(charts: Sequence[Chart], label: str, *, columns: int = 2) -> str:
    """Draw all charts in rows, as an SVG that stands by itself."""
    drawing = Drawing()
    for number, chart in enumerate(charts):
        _draw_one(drawing, chart, number % columns * _WIDTH, number // columns * _HEIGHT)
    rows = -(-len(charts) // columns)
    words = "; ".join(chart.title for chart in charts)
    return drawing.render(
        _WIDTH * min(columns, len(charts)), _HEIGHT * rows, label, words, sheet=STANDALONE_SHEET
    )


def _draw_one(drawing: Drawing, chart: Chart, left: float, top: float) -> None:
    legend_rows = _legend_rows(chart)
    bottom = _HEIGHT - 44.0 - LINE * len(legend_rows)
    area = Rect(left + _LEFT, top + _TOP, _WIDTH - _LEFT - _RIGHT, bottom - _TOP)
    drawing.text(left + 10, top + 18, chart.title, width=_WIDTH - 20, bold=True)
    drawing.text(left + 10, top + 34, chart.y_label, width=_WIDTH - 20, muted=True)
    low, high, ticks = _scale(chart)

    def height(value: float) -> float:
        value = max(value, low)
        if chart.logarithmic:
            share = math.log(value / low) / math.log(high / low)
        else:
            share = (value - low) / (high - low)
        return area.bottom - share * area.height

    for tick in ticks:
        drawing.line((area.x, height(tick)), (area.right, height(tick)), dashed=True)
        drawing.text(area.x - 6, height(tick) + 4, f"{tick:g}", width=_LEFT, anchor="end", muted=True)
    step = area.width / max(1, len(chart.places) - 1)
    for index, place in enumerate(chart.places):
        x = area.x + index * step
        drawing.text(x, area.bottom + LINE, str(place), width=step, anchor="middle", muted=True)
    drawing.text(
        area.center, area.bottom + 2 * LINE, chart.x_label, width=area.width, anchor="middle", muted=True
    )
    for name, values in chart.series.items():
        points = [(area.x + i * step, height(value)) for i, value in enumerate(values) if value is not None]
        color = _color(chart, name)
        drawing.curve(points, color)
        for point in points:
            drawing.dot(*point, color)
    y = area.bottom + 2 * LINE + 4
    for row in legend_rows:
        y += LINE
        x = area.x
        for name in row:
            drawing.curve([(x, y - 4), (x + 16, y - 4)], _color(chart, name))
            drawing.text(x + 20, y, name, width=_WIDTH)
            x += _legend_width(name)


def _color(chart: Chart, name: str) -> str:
    given = chart.colors or {}
    return given.get(name) or COLORS[list(chart.series).index(name) % len(COLORS)]


def _legend_width(name: str) -> float:
    return 34 + text_width(name, FONT_SIZE)


def _legend_rows(chart: Chart) -> list[list[str]]:
    rows: list[list[str]] = [[]]
    for name in chart.series:
        width = sum(map(_legend_width, [*rows[-1], name]))
        if rows[-1] and width > _WIDTH - _LEFT:
            rows.append([])
        rows[-1].append(name)
    return rows


def _scale(chart: Chart) -> tuple[float, float, list[float]]:
    """Return the ends of the y axis, and the places where it has a line."""
    values = [value for series in chart.series.values() for value in series if value is not None]
    if chart.logarithmic:
        first = math.floor(math.log10(min(values)))
        last = max(first + 1, math.ceil(math.log10(max(values))))
        return 10.0**first, 10.0**last, [10.0**power for power in range(first, last + 1)]
    high = max(values) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(high))
    step = next(size * magnitude for size in (0.2, 0.5, 1.0, 2.0) if high / (size * magnitude) <= 5.5)
    count = math.ceil(high / step - 1e-9)
    return 0.0, count * step, [round(number * step, 10) for number in range(count + 1)]
