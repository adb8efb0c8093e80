"""A grid of answers in plain text: one answer below the other, each under its settings."""

from __future__ import annotations

from collections.abc import Sequence

from nbengine.widgets.grid.grid import GridCell, GridLayout, left_out
from nbengine.widgets.words import joined

_LABEL_CHARACTERS = 120
_FINAL_CHARACTERS = 400_000
_LEAST_CHARACTERS = 100


def live_text(head: str, num_characters: int) -> str:
    """Render one line, since a frontend that shows plain text cannot show how a grid grows."""
    return f"[{head} · {num_characters:,} characters]"


def final_text(layout: GridLayout, cells: Sequence[GridCell], foot: str, notes: Sequence[str] = ()) -> str:
    """Render the answers of `cells`, which are the first ones, and the sums."""
    limit = max(_LEAST_CHARACTERS, _FINAL_CHARACTERS // len(cells))
    blocks = [cell_text(layout.label(index), cell, limit) for index, cell in enumerate(cells)]
    lines = [f"[{line}]" for line in (left_out(layout, len(cells)), foot, *notes) if line]
    return "\n\n".join([*blocks, "\n".join(lines)] if lines else blocks)


def cell_text(label: str, cell: GridCell, limit: int | None = None) -> str:
    """Render one request's answers under their settings."""
    if len(label) > _LABEL_CHARACTERS:
        label = label[: _LABEL_CHARACTERS - 1] + "…"
    lines = [f"── {label} ──"]
    for number, answer in enumerate(cell.answers, 1):
        if len(cell.answers) > 1:
            lines.append(f"{number}.")
        cut = limit is not None and len(answer) > limit
        lines.append(f"{answer[:limit]} …" if cut else answer)
    if cell.error:
        lines.append(f"failed: {cell.error}")
    lines += [f"[{line}]" for line in (joined(*map(str, cell.scores)), cell.foot) if line]
    return "\n".join(lines)
