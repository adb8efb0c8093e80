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


def request_color(number: int) -> str:
    """Return the colour of a request, by the number that its engine core has given it."""
    return REQUESTS[number % len(REQUESTS)]


def ink_on(color: str) -> str:
    """Choose black or white, whichever can be read on a colour."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "#000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#fff"


def script() -> str:
    """Render the tables as an ES module."""
    tables = {
        "REQUESTS": REQUESTS,
        "ROLES": ROLES,
        "CACHED_OPACITY": CACHED_OPACITY,
        "FREE_OPACITY": FREE_OPACITY,
    }
    lines = [f"export const {name} = {json.dumps(value, indent=2)};\n" for name, value in tables.items()]
    return "// Made from widgets/dashboard/palette.py: change the colours there.\n" + "".join(lines)


if __name__ == "__main__":
    (STATIC / "dashboard" / "palette.js").write_text(script())
