"""The KV blocks in as many cells as there is room for: a cell has one block or several."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nbengine.client.observe.trace_mirror import BlockMap, TraceMirror
from nbengine.widgets.dashboard.palette import REQUESTS
from nbengine.widgets.words import count


@dataclass(frozen=True, slots=True)
class BlockCells:
    """Arrays with one element for each cell; each block is in exactly one cell, in the order of their ids."""

    blocks_per_cell: int
    """Blocks in each cell but the last, which may have fewer."""
    total: NDArray[np.int64]
    """Blocks in the cell; this is the sum of `held`, `cached` and `free`."""
    held: NDArray[np.int64]
    """Blocks that requests hold."""
    cached: NDArray[np.int64]
    """Blocks that nobody holds and that can be found by hash."""
    free: NDArray[np.int64]
    """Blocks that nobody holds and that cannot be found."""
    shared: NDArray[np.int64]
    """Blocks that more than one request holds."""
    most_references: NDArray[np.int64]
    """The greatest reference count in the cell."""
    color: NDArray[np.int64]
    """Index into `REQUESTS` of the colour that most of the held blocks have; -1 where none is held."""
    holder: NDArray[np.int64]
    """Number of the request that took the cell's first held block last; -1: none is held, or unknown."""


def cells_of(blocks: BlockMap, max_cells: int) -> BlockCells:
    """Put the blocks, of which there is at least one, into at most `max_cells` cells."""
    num_blocks = blocks.num_blocks
    width = max(1, -(-num_blocks // max_cells))
    cell = np.arange(num_blocks) // width
    num_cells = -(-num_blocks // width)

    def per_cell(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        return np.bincount(cell[mask], minlength=num_cells)

    held = blocks.ref_counts > 0
    # A held block whose request is unknown gets the first colour.
    color_of_block = np.maximum(blocks.holder, 0) % len(REQUESTS)
    table = np.bincount(
        cell[held] * len(REQUESTS) + color_of_block[held], minlength=num_cells * len(REQUESTS)
    ).reshape(num_cells, len(REQUESTS))
    holder = np.full(num_cells, -1, np.int64)
    places = np.flatnonzero(held)[::-1]
    holder[cell[places]] = blocks.holder[places]
    num_held = per_cell(held)
    return BlockCells(
        blocks_per_cell=width,
        total=np.bincount(cell, minlength=num_cells),
        held=num_held,
        cached=per_cell(~held & blocks.cached),
        free=per_cell(~held & ~blocks.cached),
        shared=per_cell(blocks.ref_counts > 1),
        most_references=np.maximum.reduceat(blocks.ref_counts, np.arange(0, num_blocks, width)).astype(
            np.int64
        ),
        color=np.where(num_held > 0, table.argmax(axis=1), -1),
        holder=holder,
    )


def summary(mirror: TraceMirror) -> str:
    """Count an engine core's blocks of each kind, and its slots for the states of recurrent layers, in one line."""
    blocks, stats = mirror.blocks, mirror.stats
    held = blocks.ref_counts > 0
    num_held = int(np.count_nonzero(held))
    shared = int(np.count_nonzero(blocks.ref_counts > 1))
    cached = int(np.count_nonzero(~held & blocks.cached))
    free = blocks.num_blocks - num_held - cached
    parts = [f"{num_held:,} held ({shared:,} shared)", f"{cached:,} cached and free", f"{free:,} free"]
    found = f"{blocks.num_blocks:,} blocks of {blocks.block_size} tokens: {', '.join(parts)}"
    if stats.num_state_slots:
        num_held = stats.num_state_slots - stats.num_free_state_slots
        found += f"; {num_held:,} of {count(stats.num_state_slots, 'state slot')} held"
        found += f", {count(stats.num_checkpoints, 'checkpoint')}"
    return found


def top_holders(blocks: BlockMap, limit: int) -> list[tuple[int, int]]:
    """Return (number, held blocks that it took last) of the requests with most of them."""
    holders = blocks.holder[(blocks.ref_counts > 0) & (blocks.holder >= 0)]
    numbers, amounts = np.unique(holders, return_counts=True)
    order = np.lexsort((numbers, -amounts))[:limit]
    return [(int(numbers[index]), int(amounts[index])) for index in order]
