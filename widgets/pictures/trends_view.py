"""An engine's history as a table and small charts: HTML with pictures, and text for a terminal."""

from __future__ import annotations

from html import escape

from nbengine.metrics.history import MetricsHistory
from nbengine.widgets.dashboard.palette import ROLES
from nbengine.widgets.pictures.html import image
from nbengine.widgets.pictures.svg_parts import PAD, WIDTH, LegendEntry, finish, legend
from nbengine.widgets.pictures.text import padded, sparkline
from nbengine.widgets.pictures.trends import CHARTS, MAX_COLUMNS, Curve, Slice, Trends
from nbengine.widgets.svg import LINE, Drawing, Rect
from nbengine.widgets.words import count, seconds, table

MAX_RANKS = 8
"""The most engine cores that are shown; there is room for no more."""
TABLE_ROWS = 10
TEXT_COLUMNS = 60
_HEIGHT = 56.0
_GAP = 24.0
_CHART = (WIDTH - 2 * PAD - _GAP) / 2
_LABEL = 16
_UNKNOWN = "░"
_FINEST = 10**6
"""Parts into which a chart of text divides a value."""
_HEADER = (
    "TIME",
    "TOKENS/S",
    "TTFT P50",
    "TTFT P95",
    "ITL P50",
    "ITL P95",
    "RUNNING",
    "WAITING",
    "KV USE",
    "PREEMPTED",
)


def history_bundle(name: str, history: MetricsHistory) -> tuple[str, str]:
    """Render the history of the engine `name` as (plain text, HTML)."""
    trends = Trends(history)
    title = f"engine {name!r}: the last {seconds(trends.seconds)}"
    ranks = trends.ranks[:MAX_RANKS]
    more = len(trends.ranks) - len(ranks)
    notes = [f"{count(more, 'more engine core')}: `%engine history --rank R` shows one"] if more else []
    several = len(ranks) > 1
    rows = [row for rank in ranks for row in _rows(trends, rank, several=several)]
    plain, html = table(rows, ["RANK", *_HEADER] if several else _HEADER)
    texts, pictures = [], []
    for rank in ranks:
        slices = trends.of_rank(rank, MAX_COLUMNS)
        heading = f"rank {rank}" if several else ""
        texts.append("\n".join([*filter(None, [heading]), *_text(trends.of_rank(rank, TEXT_COLUMNS))]))
        pictures.append(f"<div>{image(heading or 'history', _draw(heading, slices))}</div>")
    return (
        "\n\n".join([title, plain, *texts, *notes]),
        f"<p>{escape(title)}</p>{html}{''.join(pictures)}" + "".join(f"<p>{escape(n)}</p>" for n in notes),
    )


def _rows(trends: Trends, rank: int, *, several: bool) -> list[list[str]]:
    rows = []
    for part in trends.of_rank(rank, TABLE_ROWS):
        begin = [str(rank), part.clock] if several else [part.clock]
        rows.append([*begin, *_figures(part)])
    return rows


def _figures(part: Slice) -> list[str]:
    if not part.known:
        return ["gap", *[""] * (len(_HEADER) - 2)]
    latencies = (part.ttft_p50, part.ttft_p95, part.itl_p50, part.itl_p95)
    return [
        f"{part.tokens_per_second:,.1f}" + (" (with a gap)" if part.is_gap else ""),
        *("" if value is None else seconds(value) for value in latencies),
        f"{part.running:,}",
        f"{part.waiting:,}",
        f"{part.kv_usage:.0%}",
        f"{part.preemptions:,}",
    ]


def _text(slices: list[Slice]) -> list[str]:
    """Draw each curve as a line of bars; slices with a gap are marked."""
    lines = []
    for title, curves in CHARTS.items():
        most = max((curve.value(part) or 0.0 for curve in curves for part in slices), default=0.0)
        for curve in reversed(curves):
            values = [curve.value(part) for part in slices]
            shares = [
                None if value is None or part.is_gap else round(_FINEST * value / (most or 1.0))
                for part, value in zip(slices, values, strict=True)
            ]
            bars = sparkline(shares, len(shares), _FINEST)
            marked = "".join(_UNKNOWN if part.is_gap else bar for part, bar in zip(slices, bars, strict=True))
            label = title if len(curves) == 1 else f"{title} {curve.name}"
            lines.append(f"{padded(label, _LABEL + 4)}{marked}  {_up_to(title, values)}")
    if any(part.is_gap for part in slices):
        lines.append(f"{_UNKNOWN} marks a gap: the engine core or its host did not run")
    return lines


def _up_to(title: str, values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "none"
    most = max(known)
    if title in ("first token", "between tokens"):
        return f"≤ {seconds(most)}"
    if title == "KV cache in use":
        return f"≤ {most:.0%}"
    return f"≤ {most:,.1f}" if title == "tokens/s" else f"≤ {most:,.0f}"


def _draw(heading: str, slices: list[Slice]) -> str:
    """Draw the charts of an engine core, two beside each other."""
    drawing = Drawing()
    y = 1.0
    if heading:
        drawing.text(PAD, y + 12, heading, width=WIDTH - 2 * PAD, bold=True)
        y += LINE + 4
    charts = list(CHARTS.items())
    for index in range(0, len(charts), 2):
        feet = [
            _chart(drawing, title, curves, slices, PAD + place * (_CHART + _GAP), y)
            for place, (title, curves) in enumerate(charts[index : index + 2])
        ]
        y = max(feet)
    return finish(drawing, y, "history", "\n".join(_text(slices)), standalone=True)


def _chart(
    drawing: Drawing, title: str, curves: tuple[Curve, ...], slices: list[Slice], left: float, y: float
) -> float:
    """Draw a chart whose title stands at the height `y`; return the height below it."""
    drawing.text(left, y + 12, title, width=_CHART, bold=True)
    foot = y + LINE + 4 + _HEIGHT
    width = _CHART / max(1, len(slices))
    drawing.bar(Rect(left, foot, _CHART, 1), "currentColor", opacity=0.4)
    for index, part in enumerate(slices):
        if part.is_gap:
            drawing.open_group("gap", gap=index)
            drawing.bar(
                Rect(left + index * width, foot - _HEIGHT, width, _HEIGHT), ROLES["free"], opacity=0.35
            )
            drawing.close_group()
    most = max(
        ((curve.value(part) or 0.0) + curve.on(part) for curve in curves for part in slices), default=0.0
    )
    scale = (_HEIGHT - 2) / (most or 1.0)
    entries = []
    for curve in curves:
        values = [curve.value(part) for part in slices]
        bars = [
            (left + (index + 0.5) * width, foot - scale * curve.on(part), scale * value)
            for index, (part, value) in enumerate(zip(slices, values, strict=True))
            if value
        ]
        drawing.open_group(f"{title}: {curve.name}", role=curve.role)
        drawing.columns(bars, ROLES[curve.role], thickness=max(0.5, width - 0.2))
        drawing.close_group()
        entries.append(LegendEntry(ROLES[curve.role], f"{curve.name} {_up_to(title, values)}"))
    if any(part.is_gap for part in slices):
        entries.append(LegendEntry(ROLES["free"], "gap", opacity=0.35))
    return legend(drawing, entries, foot + 5, left, left + _CHART)
