"""This module draws with SVG: boxes, lines and text that fits, with everything escaped."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from nbengine.widgets.dashboard.palette import contrast_sheet

FONT = "var(--jp-code-font-family,ui-monospace),Menlo,Consolas,'DejaVu Sans Mono',monospace"
FONT_SIZE = 12.0
PAGE_STYLE = "color:var(--jp-content-font-color1,inherit)"
"""The style of a picture in a page: letters have the page's colour."""
STANDALONE_SHEET = (
    "<style>svg{color-scheme:light dark;color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6e8eb;background:#14171a}}</style>"
)
"""The style sheet of a picture in a file, which has its own ground."""
ADVANCE = 0.61
"""The width of a character of a monospaced font, in font sizes; the widest in use have 0.602."""
LINE = 16.0
_HEAD = 3.5


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle, in user units."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Return the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Return the lower edge."""
        return self.y + self.height

    @property
    def center(self) -> float:
        """Return the x of the middle."""
        return self.x + self.width / 2

    @property
    def middle(self) -> float:
        """Return the y of the middle."""
        return self.y + self.height / 2


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the width of a line of monospaced text; East Asian wide characters take two places."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return (len(text) + wide) * ADVANCE * size


def fitted(text: str, width: float) -> str:
    """Cut the text with an ellipsis if it is wider than `width`."""
    if text_width(text) <= width:
        return text
    while text and text_width(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _short(number: float) -> str:
    """Format a coordinate to a tenth, in as few characters as possible."""
    return f"{round(number, 1):g}"


class _Path:
    """A path of strokes, each relative to the end of the last one: half as long as with whole coordinates."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._x = self._y = 0
        """The position in tenths, so that no rounding errors add up."""

    def stroke(self, x: float, y: float, length: float, way: str) -> None:
        """Add a stroke from a point to the right ("h") or down ("v"), `length` long."""
        left, top, far = round(10 * x), round(10 * y), round(10 * length)
        move = f"{_tenths(left - self._x)} {_tenths(top - self._y)}"
        self._parts.append(f"m{move}{way}{_tenths(far)}")
        self._x, self._y = (left + far, top) if way == "h" else (left, top + far)

    def __str__(self) -> str:
        return "".join(self._parts)


def _tenths(number: int) -> str:
    return f"{number / 10:g}"


class Drawing:
    """The elements of an SVG in the order in which they are painted."""

    def __init__(self) -> None:
        self._elements: list[str] = []

    def box(self, rect: Rect, color: str, *, opacity: float = 0.08, dashed: bool = False) -> None:
        """Draw a rounded rectangle, outlined and lightly filled."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._elements.append(
            f'<rect x="{rect.x:g}" y="{rect.y:g}" width="{rect.width:g}" height="{rect.height:g}" rx="5" '
            f'fill="{color}" fill-opacity="{opacity:g}" stroke="{color}" stroke-width="1.5"{dash}/>'
        )

    def bar(self, rect: Rect, color: str, *, opacity: float) -> None:
        """Draw a filled rectangle without an outline."""
        self._elements.append(
            f'<rect x="{rect.x:.1f}" y="{rect.y:.1f}" width="{rect.width:.1f}" height="{rect.height:.1f}" '
            f'fill="{color}" fill-opacity="{opacity:g}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        width: float,
        anchor: str = "start",
        bold: bool = False,
        muted: bool = False,
    ) -> None:
        """Draw a line of text on the base line `y`, cut where it would be wider than `width`."""
        weight = ' font-weight="600"' if bold else ""
        faint = ' opacity="0.8"' if muted else ""
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="currentColor"{weight}{faint}>'
            f"{escape(fitted(text, width))}</text>"
        )

    def line(
        self, *points: tuple[float, float], start: bool = False, end: bool = False, dashed: bool = False
    ) -> None:
        """Draw a line through points, horizontal or vertical piece by piece, with optional arrow heads."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="3 4"' if dashed else ""
        self._elements.append(
            f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-opacity="0.6"{dash}/>'
        )
        if end:
            self._head(points[-2], points[-1])
        if start:
            self._head(points[1], points[0])

    def curve(self, points: Sequence[tuple[float, float]], color: str) -> None:
        """Draw a coloured line from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._elements.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')

    def dot(self, x: float, y: float, color: str) -> None:
        """Draw a point of a curve."""
        self._elements.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>')

    def cross(self, rect: Rect, color: str) -> None:
        """Draw both diagonals of a rectangle."""
        corners = f"M{rect.x:g},{rect.y:g}L{rect.right:g},{rect.bottom:g}M{rect.right:g},{rect.y:g}L{rect.x:g},{rect.bottom:g}"
        self._elements.append(f'<path d="{corners}" stroke="{color}" stroke-opacity="0.45" fill="none"/>')

    def runs(
        self,
        runs: Iterable[tuple[float, float, float]],
        color: str,
        *,
        thickness: float,
        opacity: float = 1.0,
        dash: tuple[float, float] | None = None,
    ) -> None:
        """Draw horizontal strokes (x, y of its middle, length) as one element; dashes begin again in each."""
        path = _Path()
        for x, y, length in runs:
            path.stroke(x, y, length, "h")
        self._strokes(str(path), color, thickness, opacity, dash)

    def columns(self, columns: Iterable[tuple[float, float, float]], color: str, *, thickness: float) -> None:
        """Draw vertical strokes (x of its middle, y of its foot, height) as one element."""
        path = _Path()
        for x, y, height in columns:
            path.stroke(x, y, -height, "v")
        self._strokes(str(path), color, thickness)

    def marks(self, places: Iterable[tuple[float, float]], shape: str, color: str, *, filled: bool) -> None:
        """Draw the same small shape, a path relative to its middle, at many places."""
        path = "".join(f"M{_short(x)} {_short(y)}{shape}" for x, y in places)
        if path:
            paint = f'fill="{color}"' if filled else f'fill="none" stroke="{color}" stroke-width="2"'
            self._elements.append(f'<path d="{path}" {paint}/>')

    def glyphs(self, places: Sequence[tuple[float, str]], y: float, color: str, *, size: float) -> None:
        """Draw single characters on the base line `y`, each centred at its x."""
        if places:
            lefts = " ".join(f"{x - size * ADVANCE / 2:.0f}" for x, _ in places)
            self._elements.append(
                f'<text x="{lefts}" y="{_short(y)}" font-size="{size:g}" fill="{color}">'
                f"{escape(''.join(glyph for _, glyph in places))}</text>"
            )

    def open_group(self, title: str, **data: object) -> None:
        """Begin a group with a tooltip."""
        attributes = "".join(f' data-{name}="{escape(str(value))}"' for name, value in data.items())
        self._elements.append(f"<g{attributes}><title>{escape(title)}</title>")

    def close_group(self) -> None:
        """End the group."""
        self._elements.append("</g>")

    def render(
        self, width: float, height: float, label: str, description: str, *, style: str = "", sheet: str = ""
    ) -> str:
        """Render the whole SVG, as wide as its place allows at most; `label` and `description` are spoken.

        `style` is the style of the SVG itself, `sheet` a style sheet as an element.
        """
        drawn = "".join(self._elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="nbe-picture" role="img" aria-label="{escape(label)}" '
            f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
            f'font-family="{escape(FONT)}" font-size="{FONT_SIZE:g}" '
            f'style="max-width:100%;height:auto;{style}">'
            f"{sheet}{contrast_sheet(drawn, standalone=bool(sheet))}<desc>{escape(description)}</desc>{drawn}</svg>"
        )

    def _strokes(
        self,
        path: str,
        color: str,
        thickness: float,
        opacity: float = 1.0,
        dash: tuple[float, float] | None = None,
    ) -> None:
        if path:
            see_through = "" if opacity == 1 else f' stroke-opacity="{opacity:g}"'
            dashes = "" if dash is None else f' stroke-dasharray="{dash[0]:g} {dash[1]:g}"'
            self._elements.append(
                f'<path d="{path}" stroke="{color}" stroke-width="{_short(thickness)}"{see_through}{dashes}/>'
            )

    def _head(self, before: tuple[float, float], tip: tuple[float, float]) -> None:
        (x0, y0), (x, y) = before, tip
        length = abs(x - x0) + abs(y - y0)
        dx, dy = (x - x0) / length * _HEAD, (y - y0) / length * _HEAD
        corners = [(x, y), (x - 2 * dx + dy, y - 2 * dy - dx), (x - 2 * dx - dy, y - 2 * dy + dx)]
        points = " ".join(f"{a:g},{b:g}" for a, b in corners)
        self._elements.append(f'<polygon points="{points}" fill="currentColor" fill-opacity="0.6"/>')
