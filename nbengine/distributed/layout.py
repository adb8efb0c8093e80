"""The ranks of an engine's workers, free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbengine.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one worker. Tensor-parallel neighbours have neighbouring ranks: rank = pp_rank * tp_size +
    tp_rank.

    `rank` is the worker's number within its engine core, which is number `dp_rank` of `dp_size`. With
    `expert_parallel` the
    workers that compute a layer's experts together have whole experts, else a part of every expert.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1
    expert_parallel: bool = False

    @classmethod
    def of(cls, rank: int, parallel: ParallelConfig) -> RankLayout:
        """Return the place of a worker of one engine core, 0 <= rank < parallel.world_size."""
        tp_size = parallel.tensor_parallel_size
        return cls(
            rank % tp_size,
            tp_size,
            rank // tp_size,
            parallel.pipeline_parallel_size,
            parallel.data_parallel_rank,
            parallel.data_parallel_size,
            parallel.enable_expert_parallel,
        )

    @property
    def expert_rank(self) -> int:
        """Return the worker's number among the `expert_size` workers that compute the experts of a layer
        together."""
        return self.dp_rank * self.tp_size + self.tp_rank

    @property
    def expert_size(self) -> int:
        """Count the workers that compute the experts of a layer together: those of one stage of all engine
        cores."""
        return self.dp_size * self.tp_size

    @property
    def rank(self) -> int:
        """Return the worker's number within its engine core."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def number(self) -> int:
        """Return the worker's number among the workers of all engine cores; those of the first come first."""
        return self.dp_rank * self.world_size + self.rank

    @property
    def world_size(self) -> int:
        """Count the workers of the engine core."""
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        """Return whether the worker embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Return whether the worker makes logits and samples."""
        return self.pp_rank == self.pp_size - 1

    def stage_layers(self, num_layers: int) -> range:
        """Return the decoder layers of this worker's stage; the first stages have one more where they cannot
        be even."""
        each, more = divmod(num_layers, self.pp_size)
        start = self.pp_rank * each + min(self.pp_rank, more)
        return range(start, start + each + (self.pp_rank < more))

    def __str__(self) -> str:
        parts = [f"TP{self.tp_rank}"] if self.tp_size > 1 else []
        parts += [f"PP{self.pp_rank}"] if self.pp_size > 1 else []
        return " ".join(parts) or "rank 0"


def layouts(parallel: ParallelConfig) -> Iterator[RankLayout]:
    """Iterate over the places of all workers of one engine core, by rank."""
    return (RankLayout.of(rank, parallel) for rank in range(parallel.world_size))


ALONE = RankLayout()
"""The place of a worker without others."""
