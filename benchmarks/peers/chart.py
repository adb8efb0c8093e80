"""A chart of how much of the machine each engine uses: a bar for each engine and case."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.widgets.svg import LINE, STANDALONE_SHEET, Drawing, Rect
from peers.table import Figures, number

COLORS = {
    "nbengine": "#3b82f6",
    "llama_cpp": "#d9822b",
    "openvino": "#2f9e6e",
    "mistralrs": "#c2476d",
    "transformers": "#9b6dd6",
}
_NAMES, _BARS, _FIGURES, _GAP = 260.0, 420.0, 260.0, 10.0
_WIDTH = _NAMES + _BARS + _FIGURES + 2 * _GAP


def draw(found: Sequence[Figures]) -> str:
    """Draw as an SVG that stands by itself: the bars' full length is the floor."""
    drawing = Drawing()
    top = LINE
    drawing.text(_GAP, top, "share of what the machine can do (full width: all of it)", width=_WIDTH)
    for figures in found:
        top += _GAP + LINE
        drawing.text(_GAP, top, figures.case.name, width=_NAMES)
        for engine in figures.engines:
            share = figures.share_of_floor(engine)
            middle = top - LINE / 4
            drawing.bar(Rect(_NAMES, middle - 5, _BARS, 10), COLORS[engine], opacity=0.12)
            drawing.bar(Rect(_NAMES, middle - 5, _BARS * min(share, 1), 10), COLORS[engine], opacity=0.9)
            value = f"{number(figures.median(engine))} {figures.case.unit}"
            drawing.text(_NAMES + _BARS + _GAP, top, f"{share:.0%}, {value}, {engine}", width=_FIGURES)
            top += LINE
    words = "; ".join(figures.case.name for figures in found)
    return drawing.render(_WIDTH, top + _GAP, "engines beside each other", words, sheet=STANDALONE_SHEET)
