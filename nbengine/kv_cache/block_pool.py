"""The fixed pool of KV blocks: references, the prefix cache's index, and the order of eviction."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from nbengine.errors import NBEngineError
from nbengine.kv_cache.observer import CacheObserver


class BlockPool:
    """`num_blocks` KV blocks, identified by the integers from 0 to `num_blocks - 1`.

    A block is held by as many requests as its reference count says. A block that nobody holds is free, and
    is in one of two places: *blank* blocks, whose contents nobody can find, on a stack; *cached* blocks,
    which are findable by hash, in a queue from the least to the most recently freed. Blank blocks are handed
    out first, then the least recently used cached ones, which lose their hash. Every operation takes constant
    time per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # The top of the stack is its end: block 0 is handed out first.
        self._blank = list(range(num_blocks - 1, -1, -1))
        # An OrderedDict is a doubly linked list with an index: a block can leave from the middle.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.observers: tuple[CacheObserver, ...] = ()
        """The observers that hear of every change of the index; none unless somebody wants to know, or there are
        checkpoints of recurrent states, which are of no use without their blocks."""

    @property
    def num_free_blocks(self) -> int:
        """Return the number of blocks with reference count 0, cached or not."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_cached_blocks(self) -> int:
        """Return the number of blocks that can be found by hash, held or free."""
        return len(self._block_of)

    def cached_blocks(self) -> dict[bytes, int]:
        """Return a copy of the index: block ids by hash."""
        return self._block_of.copy()

    def ref_count(self, block_id: int) -> int:
        """Return how many requests hold the block."""
        return self._ref_counts[block_id]

    def find(self, block_hash: bytes) -> int | None:
        """Return the cached block with this hash, None if there is none."""
        return self._block_of.get(block_hash)

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of `hashes` that is cached."""
        block_of = self._block_of
        found = []
        for block_hash in hashes:
            block_id = block_of.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_free(self, block_ids: Sequence[int]) -> int:
        """Count those of `block_ids` that nobody holds."""
        ref_counts = self._ref_counts
        return sum(1 for block_id in block_ids if not ref_counts[block_id])

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks out of the pool, each with one reference and no hash.

        Raises:
            NBEngineError: fewer blocks are free; the pool is unchanged.
        """
        if count > self.num_free_blocks:
            raise NBEngineError(
                f"{count} KV blocks wanted, {self.num_free_blocks} of {self.num_blocks} are free"
            )
        blank = self._blank
        # The last `count` blocks from the top of the stack, or all if it has fewer.
        block_ids = blank[: -count - 1 : -1]
        del blank[len(blank) - len(block_ids) :]
        while len(block_ids) < count:
            block_ids.append(self._evict())
        ref_counts = self._ref_counts
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def take(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each of these cached blocks."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            if not ref_counts[block_id]:
                # A cached block that nobody holds is always in this queue.
                del self._evictable[block_id]
            ref_counts[block_id] += 1

    def free(self, block_ids: Iterable[int]) -> None:
        """Drop a reference to each block, in this order: the first that stays cached is evicted first.

        Raises:
            NBEngineError: a block was free already.
        """
        ref_counts = self._ref_counts
        for block_id in block_ids:
            left = ref_counts[block_id] - 1
            if left < 0:
                raise NBEngineError(f"KV block {block_id} was freed twice")
            ref_counts[block_id] = left
            if not left:
                if self._hashes[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._evictable[block_id] = None

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Make a held block findable, in place of any other block with the same contents."""
        # The new block wins, because it is held, while the other one may be next to be evicted.
        duplicate = self._block_of.get(block_hash)
        if duplicate is not None:
            self._hashes[duplicate] = None
            if not self._ref_counts[duplicate]:
                del self._evictable[duplicate]
                self._blank.append(duplicate)
            for observer in self.observers:
                observer.replaced(duplicate)
        self._block_of[block_hash] = block_id
        self._hashes[block_id] = block_hash

    def forget(self, block_ids: Iterable[int]) -> None:
        """Make held blocks unfindable; their holders keep them."""
        for block_id in block_ids:
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._block_of[block_hash]
                self._hashes[block_id] = None
                for observer in self.observers:
                    observer.evicted(block_id, block_hash)

    def forget_all(self) -> bool:
        """Make every block blank and return True, or return False while any block is held."""
        if self.num_free_blocks < self.num_blocks:
            return False
        self._block_of.clear()
        for observer in self.observers:
            observer.cleared()
        self._hashes = [None] * self.num_blocks
        # From the top of the stack they are handed out in the order in which they would have been evicted.
        self._blank.extend(reversed(self._evictable))
        self._evictable.clear()
        return True

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Check the whole state against the block tables of all holders, in time linear in the pool.

        Raises:
            NBEngineError: a reference count is wrong, a block is lost, free twice or held while free, or the
                index and the blocks' hashes disagree.
        """
        holders = Counter(block_id for table in held for block_id in table)
        free = Counter([*self._blank, *self._evictable])
        for block_id, count in enumerate(self._ref_counts):
            if count != holders[block_id]:
                raise NBEngineError(
                    f"KV block {block_id} has reference count {count}, but {holders[block_id]} holders"
                )
            if free[block_id] != (count == 0):
                raise NBEngineError(
                    f"KV block {block_id} with reference count {count} is {free[block_id]} times free"
                )
            if not count and (block_id in self._evictable) != (self._hashes[block_id] is not None):
                raise NBEngineError(f"free KV block {block_id} is in the wrong queue")
        findable = {h: block_id for block_id, h in enumerate(self._hashes) if h is not None}
        if findable != self._block_of:
            raise NBEngineError("the prefix cache's index disagrees with the blocks' hashes")

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hashes[block_id] = None
            if self.observers:
                for observer in self.observers:
                    observer.evicted(block_id, block_hash)
        return block_id
