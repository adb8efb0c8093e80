"""What the prefix cache tells those who follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nbengine.scheduler.request import Request


class CacheObserver(Protocol):
    """Hears what happens to the prefix cache's index, at once and in order; it must not change anything."""

    def stored(self, request: Request, start: int, end: int) -> None:
        """The blocks `start` to `end - 1` of a request's table can be found from now on."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """A block cannot be found any more, because its place is needed."""

    def replaced(self, block_id: int) -> None:
        """A block cannot be found any more: one that is stored next has the same contents."""

    def cleared(self) -> None:
        """Nothing can be found any more."""
