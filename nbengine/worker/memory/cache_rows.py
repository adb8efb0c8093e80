"""The rows of a KV cache whose layers keep different numbers of a token.

All groups of layers take blocks from one pool, so that a block has the memory that the widest layers need. Where others
need less, a block's memory counts as several blocks of theirs, of which the first is used: their tables have the numbers
of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nbengine.distributed.layout import RankLayout
from nbengine.errors import EngineStartError
from nbengine.kernels.kv_cache import head_width
from nbengine.kv_cache.specs import CacheGroups
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.sharding import DecoderShard


@dataclass(frozen=True, slots=True)
class CacheRows:
    """`widest` is the numbers of a token's key, or value, in a rank's widest layers, and `spreads` says for each group of
    layers how many blocks of theirs a block's memory is."""

    widest: int
    spreads: tuple[int, ...]

    @classmethod
    def of(
        cls, config: DecoderConfig, layout: RankLayout, dtype: torch.dtype, groups: CacheGroups
    ) -> CacheRows:
        """Return the rows of a rank's cache of type `dtype`.

        Raises:
            EngineStartError: the rows of some layers do not divide those of the widest.
        """
        rows = [1] * groups.num_tables
        for layer, group in enumerate(groups.layer_groups):
            if group < groups.num_tables:
                rows[group] = layer_row(config.of_layer(layer), layout, dtype)
        widest = max(rows, default=0)
        if any(widest % row for row in rows):
            raise EngineStartError(
                f"layers of this model keep {_listed(rows)} numbers of a token, the scales of kv_cache_dtype with them, and "
                "the smaller ones must divide the largest; set kv_cache_dtype='auto' or another tensor_parallel_size"
            )
        return cls(widest, tuple(widest // row for row in rows))


def layer_row(config: DecoderConfig, layout: RankLayout, dtype: torch.dtype) -> int:
    """Return the numbers of a token's key in a layer of a rank, `config` being that of the layer."""
    return DecoderShard.of(config, layout).num_kv_heads * head_width(dtype, config.head_dim)


def _listed(rows: Sequence[int]) -> str:
    return " and ".join(map(str, sorted(set(rows))))
