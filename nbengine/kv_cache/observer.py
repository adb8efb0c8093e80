"""The protocol with which the prefix cache tells its followers of changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbengine.kv_cache.holder import BlockHolder


class CacheObserver(Protocol):
    """An observer that hears of every change of the prefix cache's index, at once and in order.

    It must not change the index or the blocks.
    """

    def stored(self, request: BlockHolder, start: int, end: int) -> None:
        """Hear that the blocks `start` to `end - 1` of each of a request's tables can be found from now on."""

    def given_back(self, request: BlockHolder, places: Sequence[int]) -> None:
        """Hear that a running request no longer holds the blocks at these places of its tables."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """Hear that a block cannot be found any more, because its place is needed."""

    def replaced(self, block_id: int) -> None:
        """Hear that a block cannot be found any more, because the next stored one has the same contents."""

    def cleared(self) -> None:
        """Hear that nothing can be found any more."""
