"""The common parts of the dashboard's pictures: their width, their ground, legends that wrap."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.widgets.svg import LINE, PAGE_STYLE, STANDALONE_SHEET, Drawing, Rect, text_width

WIDTH = 760.0
PAD = 8.0
SMALL_GAP = 6.0
_SWATCH = 11.0
_BETWEEN = 16.0

CROSS = "m-3-3l6 6m0-6l-6 6"
DIAMOND = "m0-4.5l4 4.5-4 4.5-4-4.5z"
STOP = "m0-4.5v9"
"""Shapes of `Drawing.marks`."""


class LegendEntry:
    """A name and the sign before it: a box, or one of the shapes."""

    def __init__(
        self, color: str, name: str, *, opacity: float = 1.0, shape: str = "", low: bool = False
    ) -> None:
        self.color = color
        self.name = name
        self.opacity = opacity
        self.shape = shape
        self.low = low
        """The box is half as high."""

    @property
    def width(self) -> float:
        """Return the width with the space after it."""
        return (_SWATCH + SMALL_GAP if self.color else 0.0) + text_width(self.name) + _BETWEEN

    def draw(self, drawing: Drawing, x: float, y: float) -> None:
        """Paint the entry in a line that begins at the height `y`."""
        if self.shape:
            drawing.marks([(x + _SWATCH / 2, y + 8)], self.shape, self.color, filled=self.shape.endswith("z"))
        elif self.color:
            height = _SWATCH / 2 if self.low else _SWATCH
            drawing.bar(Rect(x, y + 13 - height, _SWATCH, height), self.color, opacity=self.opacity)
        left = x + (_SWATCH + SMALL_GAP if self.color else 0.0)
        drawing.text(left, y + 12, self.name, width=WIDTH - PAD - left, muted=True)


def legend(drawing: Drawing, entries: Sequence[LegendEntry], y: float, left: float, right: float) -> float:
    """Draw entries from left to right, wrapped at `right`, and return the height below them."""
    x = left
    for entry in entries:
        if x > left and x + entry.width - _BETWEEN > right:
            x = left
            y += LINE + 2
        entry.draw(drawing, x, y)
        x += entry.width
    return y + LINE + SMALL_GAP


def finish(drawing: Drawing, height: float, label: str, description: str, *, standalone: bool) -> str:
    """Render the SVG: in the colours of its page, or with its own ground if `standalone`."""
    style, sheet = ("", STANDALONE_SHEET) if standalone else (PAGE_STYLE, "")
    return drawing.render(WIDTH, height, label, description, style=style, sheet=sheet)
