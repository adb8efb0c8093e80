"""The KV blocks as a picture: a cell has one block in the colour of its request, or several blocks."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from nbengine.client.observe.trace_mirror import BlockMap
from nbengine.widgets.dashboard.palette import (
    CACHED_OPACITY,
    FREE_OPACITY,
    REQUESTS,
    ROLES,
    ink_on,
    request_color,
)
from nbengine.widgets.following.dashboard_state import DashboardState
from nbengine.widgets.pictures.blocks import BlockCells, cells_of, summary, top_holders
from nbengine.widgets.pictures.figures import mirrors
from nbengine.widgets.pictures.svg_parts import PAD, SMALL_GAP, WIDTH, LegendEntry, finish, legend
from nbengine.widgets.svg import LINE, Drawing

PITCHES = ((16, 12), (12, 16), (9, 20))
"""(distance of cells, most rows): the first with a cell for each block is chosen, otherwise the last."""
_LEVELS = 8
"""The number of levels of a cell's height where it stands for several blocks."""
_TOP_HOLDERS = 8


def draw_blocks(state: DashboardState, *, standalone: bool) -> str:
    """Draw the block maps of all engine cores that are drawn."""
    drawing = Drawing()
    shown, note = mirrors(state)
    y = 1.0
    words = []
    for rank, mirror in shown:
        prefix = f"rank {rank}: " if len(state.mirrors) > 1 else "KV "
        words.append(prefix + summary(mirror))
        drawing.text(PAD, y + 12, words[-1], width=WIDTH - 2 * PAD, bold=True)
        y = _map(drawing, mirror.blocks, y + LINE + 4, len(shown))
    if note:
        drawing.text(PAD, y + 12, note, width=WIDTH - 2 * PAD, muted=True)
        y += LINE + SMALL_GAP
    return finish(drawing, y, "KV blocks", "\n".join(words), standalone=standalone)


def _map(drawing: Drawing, blocks: BlockMap, y: float, num_maps: int) -> float:
    if not blocks.num_blocks:
        return y + SMALL_GAP
    pitch, num_columns, max_rows = geometry(blocks.num_blocks, num_maps)
    cells = cells_of(blocks, num_columns * max_rows)
    _Grid(drawing, cells, pitch, num_columns, y).paint()
    num_rows = -(-len(cells.total) // num_columns)
    return legend(drawing, _entries(blocks, cells), y + num_rows * pitch + 4, PAD, WIDTH - PAD)


def geometry(num_blocks: int, num_maps: int) -> tuple[int, int, int]:
    """Return (distance of cells, columns, most rows) for `num_blocks` blocks in one of `num_maps` maps."""
    for pitch, rows in PITCHES:
        num_columns = int(WIDTH - 2 * PAD) // pitch
        max_rows = max(2, rows // num_maps)
        if num_blocks <= num_columns * max_rows:
            break
    return pitch, num_columns, max_rows


class _Grid:
    """A painter of cells row by row; neighbours that look alike are one stroke, dashed into cells."""

    def __init__(self, drawing: Drawing, cells: BlockCells, pitch: int, num_columns: int, top: float) -> None:
        self._drawing = drawing
        self._cells = cells
        self._pitch = pitch
        self._num_columns = num_columns
        self._top = top

    def paint(self) -> None:
        """Paint free blocks as ground, from each cell's foot the cached ones, and on these the held ones."""
        cells, drawing = self._cells, self._drawing
        drawing.open_group("free", role="free")
        self._layer(np.full(len(cells.total), _LEVELS), ROLES["free"], FREE_OPACITY)
        drawing.close_group()
        drawing.open_group("cached and free", role="cached")
        full = levels(cells.held + cells.cached, cells.total)
        self._layer(np.where(cells.cached > 0, full, 0), ROLES["cached"], CACHED_OPACITY)
        drawing.close_group()
        held = levels(cells.held, cells.total)
        for index in np.unique(cells.color[cells.color >= 0]):
            color = REQUESTS[index]
            drawing.open_group("held", role="held", color=color)
            self._layer(np.where(cells.color == index, held, 0), color, 1.0)
            drawing.close_group()
        self._references()

    def _layer(self, level_of: NDArray[np.int64], color: str, opacity: float) -> None:
        """Fill each cell up to its level; neighbours at the same level become one stroke."""
        pitch, size = self._pitch, self._pitch - 1
        runs: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
        values = level_of.tolist()
        for row, start in enumerate(range(0, len(values), self._num_columns)):
            column = 0
            for level, group in itertools.groupby(values[start : start + self._num_columns]):
                length = len(list(group))
                if level:
                    middle = self._top + row * pitch + size - size * level / _LEVELS / 2
                    runs[level].append((PAD + column * pitch, middle, length * pitch - 1))
                column += length
        for level, places in sorted(runs.items()):
            thickness = size * level / _LEVELS
            self._drawing.runs(places, color, thickness=thickness, opacity=opacity, dash=(size, 1))

    def _references(self) -> None:
        """Write a digit on each cell with a shared block: the number of its holders, "+" from ten on."""
        cells, pitch = self._cells, self._pitch
        rows: dict[tuple[int, str], list[tuple[float, str]]] = defaultdict(list)
        for cell in np.flatnonzero(cells.shared > 0):
            row, column = divmod(int(cell), self._num_columns)
            references = int(cells.most_references[cell])
            ink = ink_on(REQUESTS[cells.color[cell]])
            x = PAD + column * pitch + (pitch - 1) / 2
            rows[row, ink].append((x, str(references) if references < 10 else "+"))
        if rows:
            self._drawing.open_group("held by several requests", role="shared")
            for (row, ink), places in rows.items():
                size = min(11.0, pitch - 1.0)
                y = self._top + row * pitch + (pitch - 1 + size * 0.72) / 2
                self._drawing.glyphs(places, y, ink, size=size)
            self._drawing.close_group()


def levels(part: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the level of a part in each cell: at least 1 for any part, and full only for the whole."""
    level = np.rint(part * _LEVELS / total).astype(np.int64)
    level = np.where((part > 0) & (level == 0), 1, level)
    return np.where((part < total) & (level == _LEVELS), _LEVELS - 1, level)


def _entries(blocks: BlockMap, cells: BlockCells) -> list[LegendEntry]:
    per_cell = cells.blocks_per_cell
    tops = top_holders(blocks, _TOP_HOLDERS)
    requests = [LegendEntry(request_color(number), f"#{number}: {amount:,}") for number, amount in tops]
    others = [
        LegendEntry(ROLES["cached"], "cached, free", opacity=CACHED_OPACITY),
        LegendEntry(ROLES["free"], "free", opacity=FREE_OPACITY),
        LegendEntry("", "digit: requests that share a block"),
    ]
    size = [LegendEntry("", f"a cell: {per_cell:,} blocks")] if per_cell > 1 else []
    return list(itertools.chain(requests, others, size))
