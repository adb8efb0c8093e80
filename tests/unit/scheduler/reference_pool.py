"""A slow block pool to compare with: plain lists, one block at a time, nothing incremental."""

from __future__ import annotations

from collections.abc import Callable


class ReferencePool:
    """Blocks with the tokens that they hold spelled out: `contents[i]` is a whole prefix, or None."""

    def __init__(self, num_blocks: int, evicted: Callable[[object], None]) -> None:
        """`evicted` hears of what nobody can find any more, because its place is needed."""
        self.evicted = evicted
        self.holders = [0] * num_blocks
        self.contents: list[object] = [None] * num_blocks
        self.blank = list(reversed(range(num_blocks)))
        self.least_recent_first: list[int] = []

    def num_free(self) -> int:
        return sum(1 for count in self.holders if count == 0)

    def num_cached(self) -> int:
        return sum(1 for content in self.contents if content is not None)

    def take_one(self) -> int:
        if self.blank:
            block = self.blank.pop()
        else:
            block = self.least_recent_first.pop(0)
            self.evicted(self.contents[block])
            self.contents[block] = None
        self.holders[block] = 1
        return block

    def share_one(self, block: int) -> None:
        if self.holders[block] == 0:
            self.least_recent_first.remove(block)
        self.holders[block] += 1

    def free_one(self, block: int) -> None:
        assert self.holders[block] > 0
        self.holders[block] -= 1
        if self.holders[block] == 0:
            (self.blank if self.contents[block] is None else self.least_recent_first).append(block)

    def forget_all(self) -> bool:
        if self.num_free() < len(self.holders):
            return False
        self.contents = [None] * len(self.holders)
        self.blank.extend(reversed(self.least_recent_first))
        self.least_recent_first = []
        return True
