"""The KV blocks of one engine core as a follower knows them: who holds each, and what can be found in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_FEW = 4
"""Blocks up to which a loop is quicker than numpy."""


class BlockMap:
    """The KV blocks; all arrays have one element a block.

    `version` says at which `TraceMirror.version` a block has last changed: a reader that remembers the version of its last
    look finds what is new.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.cached: NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.holder: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        """Number of the request that took it last, also when that has ended; -1: nobody is known to have done so."""
        self.position: NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        """Index in that request's table."""
        self.version: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.token_ids: NDArray[np.int32] = np.full((num_blocks, block_size), -1, np.int32)
        """[num_blocks, block_size], of cached blocks; -1 where unknown."""

    @property
    def num_blocks(self) -> int:
        """How many there are."""
        return len(self.ref_counts)

    @property
    def num_free_blocks(self) -> int:
        """Blocks with reference count 0, cached or not."""
        return self.num_blocks - int(np.count_nonzero(self.ref_counts))

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by hash, held or free."""
        return int(np.count_nonzero(self.cached))

    # What happens to them. All return by how much one of the two numbers has grown, so that nobody has to count.

    def hold(self, number: int, block_ids: Sequence[int], start: int, version: int) -> int:
        """Request `number` takes blocks, as those of its table from `start` on; returns minus how many were free."""
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
        """A request lets go of its table; returns how many blocks are free now."""
        ids = np.asarray(block_ids, np.intp)
        self.ref_counts[ids] -= 1
        self.version[ids] = version
        return len(ids) - int(np.count_nonzero(self.ref_counts[ids]))

    def store(self, block_ids: Sequence[int], token_ids: Sequence[int], version: int) -> int:
        """Blocks can be found from now on, with the tokens of the first of them; returns how many could not before."""
        ids = np.asarray(block_ids, np.intp)
        num_known = int(np.count_nonzero(self.cached[ids]))
        self.cached[ids] = True
        self.version[ids] = version
        rows = np.asarray(token_ids, np.int32).reshape(-1, self.block_size)
        self.token_ids[ids[: len(rows)]] = rows
        return len(ids) - num_known

    def forget(self, block_ids: Sequence[int], version: int) -> int:
        """Blocks cannot be found any more; returns minus how many could."""
        ids = np.asarray(block_ids, np.intp)
        num_known = int(np.count_nonzero(self.cached[ids]))
        self.cached[ids] = False
        self.token_ids[ids] = -1
        self.version[ids] = version
        return -num_known

    def forget_all(self, version: int) -> int:
        """No block can be found any more; returns minus how many could."""
        return self.forget(np.flatnonzero(self.cached).tolist(), version)
