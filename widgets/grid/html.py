"""A grid of answers as an HTML table, while it grows and as it stays in the notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbengine.widgets.grid.grid import GridCell, GridLayout
from nbengine.widgets.words import PLAIN, PROSE

_MUTED = "color:var(--jp-ui-font-color2,#767676);font-size:85%"
_BOX = (
    "display:block;box-sizing:border-box;border:1px solid rgba(128,128,128,0.35);margin:0 -1px -1px 0;"
    "padding:0.4em 0.6em;text-align:left;white-space:normal;max-width:none;background:none"
)
# The table's rows wrap: in a narrow window cells stand below each other, with their labels. Where styles are
# stripped it is a plain table.
_TABLE = "display:block;border:none;margin:0 0 0.3em;padding:0 1px 1px 0;font-size:inherit"
_ROW = "display:flex;flex-wrap:wrap;background:none;padding:0"
_ROW_HEAD = f"{_BOX};font-weight:normal;background:rgba(128,128,128,0.12)"
_ABOVE, _BESIDE = "flex:1 1 100%", "flex:1 1 11em"
_CELL = f"{_BOX};flex:4 1 13em;min-width:0"
_LABEL_CHARACTERS = 300
_LIVE_CHARACTERS = 16_000
"""The most characters of all answers while they stream: their ends are shown, where new text comes."""
_FINAL_CHARACTERS = 400_000
"""The most characters of all answers in the end: such a message passes, and a notebook can keep it."""
_LEAST_CHARACTERS = 100
_STATES = {"waiting": "waiting", "failed": "failed"}


class GridHtml:
    """The HTML of a grid; cells that have not changed since the last time are not made again."""

    def __init__(self, layout: GridLayout) -> None:
        self._layout = layout
        num_cells = len(layout.rows) * len(layout.columns)
        self._live_limit = max(_LEAST_CHARACTERS, _LIVE_CHARACTERS // num_cells)
        self._final_limit = max(_LEAST_CHARACTERS, _FINAL_CHARACTERS // num_cells)
        self._drawn: list[tuple[GridCell, str] | None] = [None] * num_cells
        self._row_heads = [self._row_head(labels) for labels in layout.rows]
        self._column_heads = [_labels(layout.column_names, labels) for labels in layout.columns]

    def live(self, head: str, fraction: float, cells: Sequence[GridCell]) -> str:
        """Render the grid while it grows, below a line with a bar that is filled up to `fraction`."""
        bar = (
            '<div style="height:3px;background:rgba(128,128,128,0.25);margin:0.2em 0 0.4em">'
            f'<div style="height:3px;width:{100 * fraction:.1f}%;background:#2684ff"></div></div>'
        )
        drawn = [self._live_cell(index, cell) for index, cell in enumerate(cells)]
        return f'<div {PLAIN} style="{_MUTED}">{escape(head)}</div>{bar}{self._table(drawn)}'

    def final(self, foot: str, cells: Sequence[GridCell], notes: Sequence[str] = ()) -> str:
        """Render the grid as it stays, above a line with the sums and one for each note."""
        drawn = [
            self._cell(index, cell, self._final_limit, from_end=False) for index, cell in enumerate(cells)
        ]
        lines = "".join(
            f'<div {PLAIN} style="{_MUTED}">{escape(line)}</div>' for line in (foot, *notes) if line
        )
        return self._table(drawn) + lines

    def _live_cell(self, index: int, cell: GridCell) -> str:
        known = self._drawn[index]
        if known is not None and known[0] == cell:
            return known[1]
        drawn = self._cell(index, cell, self._live_limit, from_end=True)
        self._drawn[index] = cell, drawn
        return drawn

    def _cell(self, index: int, cell: GridCell, limit: int, *, from_end: bool) -> str:
        several = len(cell.answers) > 1
        limit = max(_LEAST_CHARACTERS, limit // max(1, len(cell.answers)))
        parts = []
        for number, text in enumerate(cell.answers, 1):
            if several:
                parts.append(f'<div style="{_MUTED};margin-top:0.3em">{number}.</div>')
            shown = cell.rich[number - 1] if cell.rich else escape(_cut(text, limit, from_end=from_end))
            parts.append(f'<div style="{PROSE}">{shown}</div>')
        if cell.error:
            parts.append(
                f'<div style="{PROSE};color:var(--jp-error-color1,#d32f2f)">{escape(cell.error)}</div>'
            )
        foot = cell.foot or ("" if cell.error else _STATES.get(cell.state, ""))
        if foot:
            parts.append(f'<div style="{_MUTED};margin-top:0.2em">{escape(foot)}</div>')
        return (
            f'<td style="{_CELL}">{self._column_heads[index % len(self._column_heads)]}{"".join(parts)}</td>'
        )

    def _table(self, drawn: Sequence[str]) -> str:
        if not drawn:
            return ""
        width = len(self._column_heads)
        rows = [
            f'<tr style="{_ROW}">{head}{"".join(drawn[width * row : width * (row + 1)])}</tr>'
            for row, head in enumerate(self._row_heads)
        ]
        return f'<table {PLAIN} style="{_TABLE}"><tbody style="display:block">{"".join(rows)}</tbody></table>'

    def _row_head(self, values: Sequence[str]) -> str:
        if not values:
            return ""
        place = _ABOVE if self._layout.column_names else _BESIDE
        return f'<th scope="row" style="{_ROW_HEAD};{place}">{_labels(self._layout.row_names, values)}</th>'


def side_by_side(parts: Sequence[str]) -> str:
    """Put pieces of HTML in boxes beside each other, as far as there is room."""
    boxes = "".join(f'<div style="{_CELL}">{part}</div>' for part in parts)
    return f'<div style="{_ROW};margin-bottom:0.3em">{boxes}</div>'


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    return "".join(
        f'<div style="{PROSE}"><span style="{_MUTED}">{escape(name)}</span> '
        f"<b>{escape(_cut(value, _LABEL_CHARACTERS, from_end=False))}</b></div>"
        for name, value in zip(names, values, strict=True)
    )


def _cut(text: str, limit: int, *, from_end: bool) -> str:
    if len(text) <= limit:
        return text
    if from_end:
        return "… " + text[-limit:]
    return f"{text[:limit]} … ({len(text) - limit:,} more characters)"
