"""A grid of answers as an HTML table, while it grows and as it stays in the notebook."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

from nbengine.widgets.grid.grid import MOST_DRAWN, GridCell, GridLayout, ScoreMark, left_out
from nbengine.widgets.words import ALARM, COLOURED, MUTED, PLAIN, PROSE

_BOX = (
    "display:block;box-sizing:border-box;border:1px solid rgba(128,128,128,0.35);margin:0 -1px -1px 0;"
    "padding:0.4em 0.6em;text-align:left;white-space:normal;max-width:none;background:none"
)
# The table's rows wrap: in a narrow window cells stand below each other, with their labels. Where styles are
# stripped it is a plain table.
_TABLE = "display:block;border:none;margin:0 0 0.3em;padding:0 1px 1px 0;font-size:inherit"
# A browser draws what is in sight; the rest has the height that it had.
_ROW = (
    "display:flex;flex-wrap:wrap;background:none;padding:0;content-visibility:auto;"
    "contain-intrinsic-size:auto 6em"
)
_ROW_HEAD = f"{_BOX};font-weight:normal;background:rgba(128,128,128,0.12)"
_ABOVE, _BESIDE = "flex:1 1 100%", "flex:1 1 11em"
_CELL = f"{_BOX};flex:4 1 13em;min-width:0"
_LABEL_CHARACTERS = 300
_LIVE_CHARACTERS = 16_000
"""The most characters of all answers while they stream: their ends are shown, where new text comes."""
_FINAL_CHARACTERS = 400_000
"""The most characters of all answers in the end: such a message passes, and a notebook can keep it."""
_LEAST_CHARACTERS = 100
_ROWS_BEFORE = 3
"""Rows that are drawn before the first one that is not complete."""
_PLACE = re.compile(r"<answer (\d+) (\d+)>")
"""The place of an answer in Markdown, by cell and number. No text can forge it, because texts are escaped."""
_RENDERED = 'class="mathjax_process tex2jax_process" style="overflow-wrap:anywhere"'
"""The attributes of an element with Markdown, in which formulas are looked for again."""
_MARK = "display:inline-block;border:1px solid {};border-radius:3px;margin:0.2em 0.3em 0 0;padding:0 0.4em;font-size:85%"
_MARK_COLORS = {"yes": "#2e9e4f", "no": "#d32f2f", "failed": "#d32f2f", "": "rgba(128,128,128,0.6)"}
_STATES = {"waiting": "waiting", "failed": "failed"}


class GridHtml:
    """The HTML of a grid; cells that have not changed since the last time are not made again."""

    def __init__(self, layout: GridLayout, key: str = "") -> None:
        """Make the HTML; a script finds the table by the id `key`, and each row by its number, if there is a key."""
        self._layout = layout
        self._key = key
        width, num_rows = len(layout.columns), len(layout.rows)
        self._num_rows = min(num_rows, max(1, MOST_DRAWN // width))
        self.num_drawn = num_cells = self._num_rows * width
        """The number of cells that are drawn at once."""
        self._live_limit = max(_LEAST_CHARACTERS, _LIVE_CHARACTERS // num_cells)
        self._final_limit = max(_LEAST_CHARACTERS, _FINAL_CHARACTERS // num_cells)
        self._drawn: dict[int, tuple[GridCell, str]] = {}
        self._column_heads = [_labels(layout.column_names, labels) for labels in layout.columns]

    def live(self, head: str, fraction: float, cells: Sequence[GridCell], first: int = 0) -> str:
        """Render the grid while it grows, below a line with a bar that is filled up to `fraction`.

        Of many cells those around the cell `first` are drawn, where the answers are being written.
        """
        bar = (
            f'<div style="height:3px;background:rgba(128,128,128,0.25);margin:0.2em 0 0.4em;{COLOURED}">'
            f'<div style="height:3px;width:{100 * fraction:.1f}%;background:#2684ff"></div></div>'
        )
        width = len(self._column_heads)
        top = min(max(0, first // width - _ROWS_BEFORE), len(self._layout.rows) - self._num_rows)
        window = range(top * width, min((top + self._num_rows) * width, len(cells)))
        self._drawn = {index: known for index, known in self._drawn.items() if index in window}
        drawn = [self._live_cell(index, cells[index]) for index in window]
        return f'<div {PLAIN} style="{MUTED}">{escape(head)}</div>{bar}{self._table(drawn, top)}'

    def final(self, foot: str, cells: Sequence[GridCell], notes: Sequence[str] = ()) -> str:
        """Render the grid as it stays, above a line with the sums and one for each note."""
        drawn = [self._cell(index, cell, self._final_limit) for index, cell in enumerate(cells)]
        return self._final(drawn, foot, notes)

    def final_markdown(
        self, foot: str, cells: Sequence[GridCell], notes: Sequence[str], rendered: Callable[[str], str]
    ) -> str:
        """Render the same as Markdown; `rendered` makes harmless Markdown of an answer.

        It is an HTML table: between two empty lines a frontend takes what stands in it for Markdown.
        """
        drawn = [self._cell(index, cell, self._final_limit, places=True) for index, cell in enumerate(cells)]
        # An empty line would end the HTML, and a dollar sign may begin mathematics that end in another cell.
        html = self._final(drawn, foot, notes).replace("\n", "&#10;").replace("$", "&#36;")

        def answer(place: re.Match[str]) -> str:
            cell = cells[int(place[1])]
            limit = _share(self._final_limit, cell)
            return f"\n\n{rendered(_cut(cell.answers[int(place[2])], limit, from_end=False))}\n\n"

        return _PLACE.sub(answer, html)

    def _final(self, drawn: Sequence[str], foot: str, notes: Sequence[str]) -> str:
        said = (left_out(self._layout, len(drawn)), foot, *notes)
        lines = "".join(f'<div {PLAIN} style="{MUTED}">{escape(line)}</div>' for line in said if line)
        return self._table(drawn) + lines

    def _live_cell(self, index: int, cell: GridCell) -> str:
        known = self._drawn.get(index)
        if known is not None and known[0] == cell:
            return known[1]
        drawn = self._cell(index, cell, self._live_limit, from_end=True)
        self._drawn[index] = cell, drawn
        return drawn

    def _cell(
        self, index: int, cell: GridCell, limit: int, *, from_end: bool = False, places: bool = False
    ) -> str:
        """Render a cell; with `places` there are places in it instead of the answers."""
        several = len(cell.answers) > 1
        limit = _share(limit, cell)
        parts = []
        for number, text in enumerate(cell.answers, 1):
            if several:
                parts.append(f'<div style="{MUTED};margin-top:0.3em">{number}.</div>')
            if places:
                parts.append(f"<div {_RENDERED}><answer {index} {number - 1}></div>")
                continue
            shown = cell.rich[number - 1] if cell.rich else escape(_cut(text, limit, from_end=from_end))
            parts.append(f'<div style="{PROSE}">{shown}</div>')
        if cell.error:
            parts.append(f'<div style="{PROSE};{ALARM}">{escape(cell.error)}</div>')
        parts += map(_mark, cell.scores)
        foot = cell.foot or ("" if cell.error else _STATES.get(cell.state, ""))
        if foot:
            parts.append(f'<div style="{MUTED};margin-top:0.2em">{escape(foot)}</div>')
        return (
            f'<td style="{_CELL}">{self._column_heads[index % len(self._column_heads)]}{"".join(parts)}</td>'
        )

    def _table(self, drawn: Sequence[str], top: int = 0) -> str:
        if not drawn:
            return ""
        width = len(self._column_heads)
        rows = [
            f'<tr{self._attribute("data-row", top + row)} style="{_ROW}">'
            f"{self._row_head(self._layout.rows[top + row])}{''.join(drawn[width * row : width * (row + 1)])}</tr>"
            for row in range(len(drawn) // width)
        ]
        return (
            f'<table{self._attribute("id", self._key)} {PLAIN} style="{_TABLE}">'
            f'<tbody style="display:block">{"".join(rows)}</tbody></table>'
        )

    def _attribute(self, name: str, value: object) -> str:
        return f' {name}="{value}"' if self._key else ""

    def _row_head(self, values: Sequence[str]) -> str:
        if not values:
            return ""
        place = _ABOVE if self._layout.column_names else _BESIDE
        return f'<th scope="row" style="{_ROW_HEAD};{place}">{_labels(self._layout.row_names, values)}</th>'


def side_by_side(parts: Sequence[str]) -> str:
    """Put pieces of HTML in boxes beside each other, as far as there is room."""
    boxes = "".join(f'<div style="{_CELL}">{part}</div>' for part in parts)
    return f'<div style="{_ROW};margin-bottom:0.3em">{boxes}</div>'


def _share(limit: int, cell: GridCell) -> int:
    """Return the most characters of each answer of a cell that may have `limit`."""
    return max(_LEAST_CHARACTERS, limit // max(1, len(cell.answers)))


def _mark(score: ScoreMark) -> str:
    text = _cut(str(score), _LABEL_CHARACTERS, from_end=False)
    return f'<span style="{_MARK.format(_MARK_COLORS[score.state])}">{escape(text)}</span>'


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    return "".join(
        f'<div style="{PROSE}"><span style="{MUTED}">{escape(name)}</span> '
        f"<b>{escape(_cut(value, _LABEL_CHARACTERS, from_end=False))}</b></div>"
        for name, value in zip(names, values, strict=True)
    )


def _cut(text: str, limit: int, *, from_end: bool) -> str:
    if len(text) <= limit:
        return text
    if from_end:
        return "… " + text[-limit:]
    return f"{text[:limit]} … ({len(text) - limit:,} more characters)"
