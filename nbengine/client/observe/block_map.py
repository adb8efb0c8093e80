"""The KV blocks of one engine core as a follower knows them: the request that holds each, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nbengine.kv_cache.holder import NO_BLOCK

_FEW = 4
"""The number of blocks up to which a loop is quicker than numpy."""


class BlockMap:
    """The KV blocks; all arrays have one element for each block.

    `version` is the `TraceMirror.version` at which a block has last changed: a reader that remembers the
    version of its last look finds the changes since then.
    """

    def __init__(self, num_blocks: int, block_size: int, num_tables: int = 1) -> None:
        self.block_size = block_size
        self.num_tables = num_tables
        """Block tables of a request, one for each group of the model's layers, which lie in one list, column by
        column: see `nbengine.kv_cache.specs.CacheGroups`."""
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.cached: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.holder: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        """The number of the request that took the block last, also when that has ended;
        -1: no such request is known."""
        self.position: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        """The place of the block in that request's tables; divided by `num_tables`, its number among those of
        its table."""
        self.version: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.token_ids: NDArray[np.int32] = np.full((num_blocks, block_size), -1, np.int32)
        """The tokens of cached blocks, [num_blocks, block_size]; -1 where unknown."""

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Count the blocks with reference count 0, cached or not."""
        return self.num_blocks - int(np.count_nonzero(self.ref_counts))

    @property
    def num_cached_blocks(self) -> int:
        """Count the blocks that can be found by hash, held or free."""
        return int(np.count_nonzero(self.cached))

    # Changes. Each returns the growth of one of these two numbers, so that a caller need not count again.

    def hold(self, number: int, block_ids: Sequence[int], start: int, version: int) -> int:
        """Let request `number` take blocks, as those of its tables from place `start` on, -1 being no block;
        return minus the number that were free."""
        if NO_BLOCK in block_ids:
            held = [(place, block_id) for place, block_id in enumerate(block_ids, start) if block_id >= 0]
            return sum(self.hold(number, [block_id], place, version) for place, block_id in held)
        if len(block_ids) <= _FEW:
            refs, num_taken = self.ref_counts, 0
            for position, block_id in enumerate(block_ids, start):
                num_taken += not refs[block_id]
                refs[block_id] += 1
                self.holder[block_id] = number
                self.position[block_id] = position
                self.version[block_id] = version
            return -num_taken
        ids = np.asarray(block_ids)
        num_held = int(np.count_nonzero(self.ref_counts[ids]))
        # No block is twice in one table.
        self.ref_counts[ids] += 1
        self.holder[ids] = number
        self.position[ids] = np.arange(start, start + len(ids))
        self.version[ids] = version
        return num_held - len(ids)

    def release(self, block_ids: Sequence[int], version: int) -> int:
        """Let a request give back blocks, -1 being none; return the number of them that are free now."""
        ids = np.asarray(block_ids, np.intp)
        ids = ids[ids >= 0]
        self.ref_counts[ids] -= 1
        self.version[ids] = version
        return len(ids) - int(np.count_nonzero(self.ref_counts[ids]))

    def store(self, block_ids: Sequence[int], token_ids: Sequence[int], version: int) -> int:
        """Make blocks cached, `token_ids` being those of the first blocks;
        return the number that were not cached before."""
        rows = np.asarray(token_ids, np.int32).reshape(-1, self.block_size)
        if len(rows) <= len(block_ids) <= _FEW:
            num_new = 0
            for block_id in block_ids:
                num_new += not self.cached[block_id]
                self.cached[block_id] = True
                self.version[block_id] = version
            for block_id, row in zip(block_ids, rows, strict=False):
                self.token_ids[block_id] = row
            return num_new
        ids = np.asarray(block_ids, np.intp)
        num_known = int(np.count_nonzero(self.cached[ids]))
        self.cached[ids] = True
        self.version[ids] = version
        self.token_ids[ids[: len(rows)]] = rows
        return len(ids) - num_known

    def forget(self, block_ids: Sequence[int], version: int) -> int:
        """Make blocks uncached; return minus the number that were cached."""
        if len(block_ids) <= _FEW:
            num_known = 0
            for block_id in block_ids:
                num_known += bool(self.cached[block_id])
                self.cached[block_id] = False
                self.token_ids[block_id] = -1
                self.version[block_id] = version
            return -num_known
        ids = np.asarray(block_ids, np.intp)
        num_known = int(np.count_nonzero(self.cached[ids]))
        self.cached[ids] = False
        self.token_ids[ids] = -1
        self.version[ids] = version
        return -num_known

    def forget_all(self, version: int) -> int:
        """Make all blocks uncached; return minus the number that were cached."""
        return self.forget(np.flatnonzero(self.cached).tolist(), version)
