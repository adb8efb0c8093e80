"""The dashboard as a part of a page without a script: a saved notebook keeps it, and a code host shows it.

Pictures are images with their data in the address: untrusted notebooks and code hosts remove inline SVG, but
show images, which follow the page's `color-scheme`. Figures and requests are text around them, whose styles
may be lost without harm.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape

from nbengine.client.observe.process_usage import printable
from nbengine.widgets.dashboard.palette import ROLES
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.figures import (
    MAX_REQUESTS,
    UNKNOWN,
    RequestRow,
    count,
    has_waves,
    header,
    hit_rate,
    kv_use,
    request_rows,
    title,
    waves,
)
from nbengine.widgets.pictures.svg_blocks import draw_blocks
from nbengine.widgets.pictures.svg_parts import WIDTH
from nbengine.widgets.pictures.svg_scheduler import draw_scheduler
from nbengine.widgets.pictures.svg_steps import draw_steps
from nbengine.widgets.pictures.text import text_dashboard
from nbengine.widgets.waves.timeline_svg import draw as draw_waves
from nbengine.widgets.words import COLOURED

MAX_TABLE_RANKS = 32
_NAME_LENGTH = 28
_LEFT = 'style="text-align:left"'
_RIGHT = 'align="right"'
_WHOLE = 'style="text-align:left;white-space:nowrap"'
_BAR = f'style="text-align:left;white-space:nowrap;{COLOURED}"'
_SMALL = 'cellpadding="4" style="font-size:11px;line-height:1.4"'
_LINE = '<p style="margin:4px 0">'
_BAR_WIDTH = 60.0
_BAR_GROUND = "rgba(138,143,152,0.3)"
_NO_BREAK = "\N{NO-BREAK SPACE}"
"""A no-break space: a style that forbids line breaks in a cell would be lost where styles are stripped."""
_NARROW = f"max-width:{WIDTH:g}px"


def static_bundle(state: DashboardState) -> dict[str, str]:
    """Render the state by MIME type."""
    return {"text/html": page(state), "text/plain": text_dashboard(state)}


def page(state: DashboardState) -> str:
    """Render the whole dashboard as HTML that also shows where only harmless HTML is let through."""
    parts = [
        header_part(state),
        *(f"<div>{image(name, svg)}</div>" for name, svg in pictures(state, standalone=True)),
        requests_part(state),
    ]
    return f'<div style="{_NARROW}">{"".join(parts)}</div>'


def pictures(state: DashboardState, *, standalone: bool) -> list[tuple[str, str]]:
    """Draw all pictures, as (name, SVG): in the page's colours, or with their own ground if `standalone`."""
    drawn = [
        ("scheduler", draw_scheduler(state, standalone=standalone)),
        ("KV blocks", draw_blocks(state, standalone=standalone)),
        ("step timeline", draw_steps(state, standalone=standalone)),
    ]
    if has_waves(state):
        drawn.append(("waves", draw_waves(waves(state), standalone=standalone)))
    return drawn


def header_part(state: DashboardState) -> str:
    """Render model, state and figures, and the engine cores if there are several."""
    model, facts = title(state)
    note = f"{_LINE}{escape(printable(state.note))}</p>" if state.note else ""
    figures = f"{_NO_BREAK}· ".join(
        f"{_unbroken(name)}{_NO_BREAK}<b>{_unbroken(value)}</b>" for name, value in header(state)
    )
    return (
        f"{_LINE}<b>{escape(model)}</b> · {escape(facts)} · <b>{escape(printable(state.state))}</b></p>"
        f"{note}{_LINE}{figures}</p>{_ranks(state)}"
    )


def requests_part(state: DashboardState) -> str:
    """Render the table of requests."""
    rows, num_more = request_rows(state, MAX_REQUESTS)
    if not rows:
        return f"{_LINE}no requests yet</p>"
    several = len(state.mirrors) > 1
    names = ["#", "request", "state", "progress", "prompt", "output", "first token", "time", "preempted"]
    head = "".join(f"<th {_LEFT}>{name}</th>" for name in (["rank"] if several else []) + names)
    body = "".join(_row(row, several=several) for row in rows)
    more = f"{_LINE}… and {num_more:,} more</p>" if num_more > 0 else ""
    own = f"{_LINE}● of this notebook</p>" if any(row.is_own for row in rows) else ""
    table = f"<table {_SMALL}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div style="overflow-x:auto">{table}</div>{more}{own}'


def image(name: str, svg: str) -> str:
    """Render a picture as an image with its data in the address."""
    data = base64.b64encode(svg.encode()).decode("ascii")
    return f'<img alt="{name}" src="data:image/svg+xml;base64,{data}" style="max-width:100%">'


def _ranks(state: DashboardState) -> str:
    """Render a row for each engine core, where there are several."""
    engines = sorted(state.stats.engines, key=lambda engine: engine.engine_index)
    if len(engines) < 2:
        return ""
    names = ("rank", "running", "waiting", "preempted", "KV use", "prefix hits", "steps", "wave")
    rows = "".join(
        _cells(
            [
                str(engine.engine_index),
                count(engine.num_running_reqs),
                count(engine.num_waiting_reqs),
                count(engine.num_preemptions),
                kv_use([engine]),
                hit_rate([engine]),
                count(engine.step_counter),
                str(engine.current_wave),
            ]
        )
        for engine in engines[:MAX_TABLE_RANKS]
    )
    num_more = len(engines) - MAX_TABLE_RANKS
    more = f"{_LINE}… and {num_more:,} more</p>" if num_more > 0 else ""
    head = "".join(f"<th {_RIGHT}>{_unbroken(name)}</th>" for name in names)
    table = f"<table {_SMALL}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    return f'<div style="overflow-x:auto">{table}</div>{more}'


def _cells(values: Sequence[str]) -> str:
    return "<tr>" + "".join(_cell(value, _RIGHT) for value in values) + "</tr>"


def _cell(text: str, style: str) -> str:
    return f"<td {style}>{_unbroken(text)}</td>"


def _unbroken(text: str) -> str:
    return escape(text.replace(" ", _NO_BREAK))


def _row(row: RequestRow, *, several: bool) -> str:
    name = row.name if len(row.name) <= _NAME_LENGTH else row.name[: _NAME_LENGTH - 1] + "…"
    marked = f"● {name}" if row.is_own else name
    cells = [
        *([(str(row.rank), _RIGHT)] if several else []),
        (str(row.number), _RIGHT),
        (marked, _WHOLE),
        (row.state, _LEFT),
    ]
    rest = (row.prompt, row.output, row.first_token, row.total_time, row.preemptions)
    before = "".join(_cell(text, style) for text, style in cells)
    after = "".join(_cell(text, _RIGHT) for text in rest)
    return f"<tr>{before}<td {_BAR}>{_bar(row)}</td>{after}</tr>"


def _bar(row: RequestRow) -> str:
    """Render cached, computed and generated tokens as parts of a bar, and their share as text."""
    parts = (("hit", row.cached), ("prefill", row.computed), ("decode", row.generated))
    width = _BAR_WIDTH
    spans = []
    done = 0.0
    for role, tokens in parts:
        length = min(width - done, width * tokens / row.whole) if row.whole else 0.0
        spans.append(_box(length, ROLES[role]))
        done += length
    spans.append(_box(width - done, _BAR_GROUND))
    percent = f"{row.done:.0%}" if row.whole else UNKNOWN
    return f"{''.join(spans)}{_NO_BREAK}{percent}"


def _box(width: float, color: str) -> str:
    if width < 0.05:
        return ""
    return (
        f'<span style="display:inline-block;width:{width:.1f}px;height:8px;background-color:{color}"></span>'
    )
