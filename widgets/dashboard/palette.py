"""The dashboard's colours: one table for the static forms and the script in the browser.

They show on light and on dark ground and stay apart for colour-blind eyes; where several mean different
things in one picture, their shapes differ, too. The greys of free blocks are half transparent, so they follow
the ground. `widgets/static/dashboard/palette.js` is made by `python -m nbengine.widgets.dashboard.palette`.
"""

from __future__ import annotations

import json

from nbengine.widgets.scripts import STATIC

REQUESTS = (
    "#15c3fb",
    "#eab401",
    "#4d42c2",
    "#e88a99",
    "#586212",
    "#7178f9",
    "#8b8702",
    "#91607d",
)
"""The colours of requests, by number: neighbours differ most."""

ROLES = {
    "prefill": "#2a6de0",
    "decode": "#45c29a",
    "recompute": "#84309a",
    "hit": "#f2c01e",
    "preempted": "#d2452f",
    "running": "#2a6de0",
    "waiting": "#e09a1a",
    "cached": "#8a8f98",
    "free": "#8a8f98",
    "dummy": "#d9822b",
}
"""The colours of everything else: what a step does, what the scheduler counts, blocks that nobody holds
(`cached` at `CACHED_OPACITY`, `free` at `FREE_OPACITY`)."""

CACHED_OPACITY = 0.6
FREE_OPACITY = 0.16
_HIGH_CONTRAST_THEME = '[data-jp-theme-name*="High Contrast"]'
"""The page whose theme is one of JupyterLab's with high contrast."""

MORE_CONTRAST = {
    "#15c3fb": ("#2493be", "#1fc4f8"),
    "#eab401": ("#a48503", "#e7bb27"),
    "#4d42c2": ("#4f45c3", "#6573d5"),
    "#e88a99": ("#d4638b", "#e78794"),
    "#586212": ("#5b560e", "#78803a"),
    "#7178f9": ("#8e71f5", "#798bff"),
    "#8b8702": ("#746f19", "#8e9c45"),
    "#91607d": ("#9b546f", "#a76b86"),
    "#2a6de0": ("#4c42eb", "#1277f6"),
    "#45c29a": ("#1d9888", "#40c49c"),
    "#84309a": ("#853495", "#a465a9"),
    "#f2c01e": ("#b97500", "#efc12a"),
    "#d2452f": ("#ae2b2a", "#da4835"),
    "#e09a1a": ("#bd7b25", "#e49712"),
    "#8a8f98": ("#888992", "#898e9b"),
    "#d9822b": ("#d46e07", "#da822f"),
}
"""The substitutes of each colour on light and on dark ground, where more contrast is wanted: they have at least 3 to 1
on the grounds of high-contrast themes, and stay as far apart as the colours themselves."""


def request_color(number: int) -> str:
    """Return the colour of a request, by the number that its engine core has given it."""
    return REQUESTS[number % len(REQUESTS)]


def ink_on(color: str) -> str:
    """Choose black or white, whichever can be read on a colour."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


def contrast_sheet(drawn: str, *, standalone: bool) -> str:
    """Make the style sheet that gives an SVG more contrast where its reader wants it.

    It has rules for those of the palette's colours that are in `drawn`. What is half transparent becomes solid; free
    blocks stay paler than others. An SVG that is part of a page heeds JupyterLab's theme, too.
    """
    rules = [
        (f'[{paint}="{color}"]', f"{paint}:light-dark({light},{dark})")
        for color, (light, dark) in MORE_CONTRAST.items()
        for paint in ("fill", "stroke")
        if f'{paint}="{color}"' in drawn
    ]
    rules += [
        (f'[{paint}-opacity="{faint:g}"]', f"{paint}-opacity:{strong:g}")
        for faint, strong in ((CACHED_OPACITY, 1), (FREE_OPACITY, 0.4))
        for paint in ("fill", "stroke")
        if f'{paint}-opacity="{faint:g}"' in drawn
    ]

    def sheet(scope: str) -> str:
        return "".join(f"{scope}{which}{{{style}}}" for which, style in rules)

    asked = sheet("" if standalone else ".nbe-picture ")
    themed = "" if standalone else sheet(f"{_HIGH_CONTRAST_THEME} .nbe-picture ")
    return f"<style>@media (prefers-contrast:more),(forced-colors:active){{{asked}}}{themed}</style>"


def script() -> str:
    """Render the tables as an ES module."""
    tables = {
        "REQUESTS": REQUESTS,
        "ROLES": ROLES,
        "CACHED_OPACITY": CACHED_OPACITY,
        "FREE_OPACITY": FREE_OPACITY,
        "MORE_CONTRAST": MORE_CONTRAST,
    }
    lines = [f"export const {name} = {json.dumps(value, indent=2)};\n" for name, value in tables.items()]
    return "// Made from widgets/dashboard/palette.py: change the colours there.\n" + "".join(lines)


if __name__ == "__main__":
    (STATIC / "dashboard" / "palette.js").write_text(script())
