"""An answer's tokens, shaded by their probability, in HTML that needs no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from nbengine.widgets.tokens.cells import Alternative, TokenCell, percent, shade

SHADE = "#e8590c"
"""The colour behind a token: the less probable, the stronger; half transparent, it suits light and dark."""
_NEGLIGIBLE = 0.001
_MARK = '<span style="opacity:.7;user-select:none{}">{}</span>{}'
_OVER = ";position:absolute"
"""The style of a mark of white space, which keeps its own width."""


def tokens_html(cells: Sequence[TokenCell], num_in_text: int | None = None) -> str:
    """Render the tokens one after the other; a tooltip on each has its alternatives.

    Tokens from `num_in_text` on, such as one that ended the answer, are not part of its text and are paler.
    """
    limit = len(cells) if num_in_text is None else num_in_text
    return "".join(_token_html(cell, outside=index >= limit) for index, cell in enumerate(cells))


def tooltip(cell: TokenCell) -> str:
    """Describe a token: in a line for it, and one for each alternative that is likely enough."""
    rank = f", rank {cell.rank}" if cell.rank else ""
    lines = [f"{percent(cell.probability)}{rank}"]
    lines += [_line(alternative, cell) for alternative in cell.alternatives if _matters(alternative, cell)]
    return "\n".join(lines)


def _matters(alternative: Alternative, cell: TokenCell) -> bool:
    return alternative.token_id == cell.token_id or alternative.probability >= _NEGLIGIBLE


def _line(alternative: Alternative, cell: TokenCell) -> str:
    pointer = "▸" if alternative.token_id == cell.token_id else " "
    return f"{pointer} {percent(alternative.probability)}  {alternative.label}"


def _token_html(cell: TokenCell, *, outside: bool) -> str:
    strength = shade(cell.probability)
    styles = [f"background:{SHADE}{strength * 16:02x};border-radius:2px"] if strength else []
    if outside:
        styles.append("opacity:.7")
    style = f' style="{";".join(styles)}"' if styles else ""
    title = escape(tooltip(cell)).replace("\n", "&#10;")
    shown = "".join(
        _MARK.format(_OVER if text else "", escape(mark), escape(text)) if mark else escape(text)
        for mark, text in cell.pieces
    )
    return f'<span title="{title}"{style}>{shown}</span>'
