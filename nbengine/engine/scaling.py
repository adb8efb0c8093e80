"""A change of the number of engine cores under way; pure like `HostState`."""

from __future__ import annotations

from dataclasses import dataclass, field

from nbengine.engine.rank_table import RankTable

MAX_SIZE = 1024
"""Engine cores that one engine may have."""


@dataclass(slots=True)
class Scaling:
    """What is still to happen until there are `size` ranks, and who asked for it."""

    asker: bytes
    size: int
    coming: set[int]
    """Ranks that are being started."""
    going: set[int]
    """Ranks whose processes are to end."""
    failures: list[str] = field(default_factory=list)

    def note_failure(self, rank: int, cause: str) -> bool:
        """Note that a core dies; tells whether it was one that is being started, which is not tried again."""
        if rank not in self.coming:
            return False
        self.coming.discard(rank)
        self.going.add(rank)
        self.failures.append(cause)
        return True

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to happen."""
        return not (self.coming or self.going)

    @property
    def error(self) -> str | None:
        """What went wrong."""
        return "; ".join(self.failures) or None


def refusal_to_scale(table: RankTable, size: int, current: Scaling | None) -> str | None:
    """Why a running engine cannot be scaled to `size`, None if it can."""
    if not 1 <= size <= MAX_SIZE:
        return f"data_parallel_size must be 1 to {MAX_SIZE}, got {size}"
    if current is not None:
        return f"the engine is being scaled to {current.size} engine cores already"
    if min(table.ready) >= size:
        return f"none of the engine cores 0 to {size - 1} takes requests now; try again when one does"
    return None
