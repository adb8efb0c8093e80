"""Reading pictures back: strokes with their places, and whether texts lie within."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree

from nbengine.widgets.svg import text_width

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Stroke:
    """A part of a path: where it begins, how long it is to the right or up."""

    color: str
    x: float
    y: float
    length: float
    thickness: float

    def cells(self, pitch: int, left: float = 8.0) -> Iterator[tuple[int, float]]:
        """Yield (column, height) of the dashes of a horizontal stroke."""
        first = round((self.x - left) / pitch)
        for column in range(first, first + round((self.length + 1) / pitch)):
            yield column, self.y


def strokes_in(element: ElementTree.Element) -> list[Stroke]:
    """List the strokes of all paths made of moves and horizontal or vertical lines."""
    found = []
    for path in element.iter(f"{SVG}path"):
        x = y = 0.0
        data = path.get("d") or ""
        if path.get("stroke-width") is None or not re.fullmatch(r"(m[-\d.e]+ [-\d.e]+[hv][-\d.e]+)+", data):
            continue
        for dx, dy, way, length in re.findall(r"m([-\d.e]+) ([-\d.e]+)([hv])([-\d.e]+)", data):
            x, y = x + float(dx), y + float(dy)
            thickness = float(path.get("stroke-width") or 0)
            found.append(Stroke(path.get("stroke") or "", x, y, abs(float(length)), thickness))
            x, y = (x + float(length), y) if way == "h" else (x, y + float(length))
    return found


def texts_fit(root: ElementTree.Element) -> bool:
    """Return whether all texts, strokes and boxes lie within the picture."""
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for text in root.iter(f"{SVG}text"):
        size = float(text.get("font-size") or 12)
        lefts = list(map(float, (text.get("x") or "0").split()))
        wide = text_width(text.text or "", size) / len(lefts)
        begin = {"start": 0.0, "middle": wide / 2, "end": wide}[text.get("text-anchor") or "start"]
        if min(lefts) - begin < 0 or max(lefts) - begin + wide > width + 0.5:
            return False
        if not size * 0.7 <= float(text.get("y") or 0) <= height:
            return False
    for stroke in strokes_in(root):
        if not (-0.1 <= stroke.x <= width and -0.1 <= stroke.y <= height):
            return False
    for rect in root.iter(f"{SVG}rect"):
        x, y, wide, high = (float(rect.get(name) or 0) for name in ("x", "y", "width", "height"))
        if x < -0.1 or y < -0.1 or x + wide > width + 0.1 or y + high > height + 0.1:
            return False
    return True
