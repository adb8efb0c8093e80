"""The parts of a decoder that workers hold; free of torch."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.distributed.layout import RankLayout
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.moe_config import MoEConfig


@dataclass(frozen=True, slots=True)
class DecoderShard:
    """The part of a decoder that one rank holds and computes: whole layers, and in each of them some heads.

    Where there are fewer key-value heads than tensor-parallel ranks, several ranks hold the same one.
    """

    layers: range
    num_heads: int
    num_kv_heads: int
    first_kv_head: int

    @classmethod
    def of(cls, config: DecoderConfig, layout: RankLayout) -> DecoderShard:
        """Return the part of the rank at `layout`; the sizes must pass `check_parallel`."""
        kv_heads = max(1, config.num_kv_heads // layout.tp_size)
        ranks_per_kv_head = max(1, layout.tp_size // config.num_kv_heads)
        return cls(
            layers=layout.stage_layers(config.num_layers),
            num_heads=config.num_heads // layout.tp_size,
            num_kv_heads=kv_heads,
            first_kv_head=layout.tp_rank // ranks_per_kv_head * kv_heads,
        )

    @property
    def num_layers(self) -> int:
        """Count the layers of the rank's stage."""
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class ExpertShard:
    """The part of a layer's experts that one worker holds and computes: `experts`, and of each its `inner`
    features.

    With expert parallelism they are whole experts, the first workers having one more where they cannot be
    even; else they are a part of every expert, the inner features being divided evenly.
    """

    experts: range
    inner: range

    @classmethod
    def of(cls, moe: MoEConfig, layout: RankLayout) -> ExpertShard:
        """Return the part of the worker at `layout`; the sizes must pass `check_parallel`."""
        rank, size = layout.expert_rank, layout.expert_size
        if layout.expert_parallel:
            each, more = divmod(moe.num_experts, size)
            first = rank * each + min(rank, more)
            return cls(range(first, first + each + (rank < more)), range(moe.intermediate_size))
        own = moe.intermediate_size // size
        return cls(range(moe.num_experts), range(rank * own, rank * own + own))
