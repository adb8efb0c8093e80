"""Quantities in words, lines and tables: the common parts of everything that is shown."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from html import escape

QUIET = "color:color-mix(in srgb,var(--jp-ui-font-color2,#808080) 60%,currentColor)"
"""The colour of quiet text, which has a contrast of 7 to 1 in each of JupyterLab's themes."""
MUTED = f"{QUIET};font-size:85%"
"""The style of a quiet line."""
ALARM = "color:color-mix(in srgb,var(--jp-error-color1,#d32f2f) 60%,currentColor)"
"""The colour of an error's text."""
COLOURED = "forced-color-adjust:none"
"""The style of what says something by its colour, also where the reader's system forces its own colours on a page."""
PROSE = "white-space:pre-wrap;overflow-wrap:anywhere"
"""The style of text that keeps its lines and wraps."""
PLAIN = 'class="mathjax_ignore tex2jax_ignore"'
"""The class of elements whose text is no mathematics: notebooks look for formulas in all HTML.

One name is MathJax 3's, the other MathJax 2's.
"""
_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters except new lines and tabs, and surrogates, which cannot be sent to a terminal."""


def count(number: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: `1 token`, `2,000 tokens`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def seconds(duration: float) -> str:
    """Format a duration in words: `84 ms`, `1.3 s`, `2 min 5 s`, `10 min`, `1 h 4 min`."""
    if duration < 1:
        return f"{duration * 1000:.0f} ms"
    if duration < 60:
        return f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    major, minor = (
        (f"{minutes} min", f"{rest} s") if minutes < 60 else (f"{minutes // 60} h", f"{minutes % 60} min")
    )
    return major if minor.startswith("0 ") else f"{major} {minor}"


def age(since: float) -> str:
    """Format the time since a `time.time()`."""
    return seconds(max(0.0, time.time() - since))


def joined(*parts: str) -> str:
    """Join the parts of a footer that are not empty, in one line."""
    return " · ".join(part for part in parts if part)


def harmless(text: str) -> str:
    """Replace the characters with which text could steer a terminal."""
    return _STEERING.sub("\ufffd", text.replace("\r\n", "\n"))


def print_quietly(line: str) -> None:
    """Print a line that says something about the output above it."""
    line = harmless(line)
    print(f"\x1b[2m[{line}]\x1b[0m" if sys.stdout.isatty() else f"[{line}]")


def muted(text: str) -> str:
    """Render text as a separate quiet line of HTML; an empty text gives none."""
    return f'<div {PLAIN} style="{MUTED}">{escape(text)}</div>' if text else ""


def table(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> tuple[str, str]:
    """Make a table as (plain text, HTML); without a header the first column holds the names."""
    lines = [list(header), *map(list, rows)] if header else list(map(list, rows))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    plain = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
    # JupyterLab has the cells of tables at the right unless they say otherwise.
    names = "".join(f'<th style="text-align:left">{escape(cell)}</th>' for cell in header)
    head = f"<thead><tr>{names}</tr></thead>"
    body = "".join("<tr>" + _html_cells(row, name_first=not header) + "</tr>" for row in rows)
    return plain, f"<table>{head if header else ''}<tbody>{body}</tbody></table>"


def _html_cells(row: Sequence[str], *, name_first: bool) -> str:
    cells = [f'<td style="text-align:left">{escape(cell)}</td>' for cell in row]
    if name_first and row:
        cells[0] = f'<th style="text-align:left">{escape(row[0])}</th>'
    return "".join(cells)
