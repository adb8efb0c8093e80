"""How much of a memory its ranks take: one rank of its GPU's, all of an engine's of a CPU's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.kv_cache.sizing import KVCacheSpec
from nbengine.models.decoder_config import decoder_config
from nbengine.models.encoder_config import is_encoder
from nbengine.models.registry import weights_bytes_of
from nbengine.models.sharding import DecoderShard


class Footprint:
    """What one rank takes (`weights_bytes`, `kv_cache_spec`), and what the ranks that share its memory take with it."""

    def __init__(
        self,
        config: EngineConfig,
        hf_config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        layout: RankLayout,
    ) -> None:
        self._hf_config = hf_config
        self._dtype = dtype
        self._block_size = config.cache.block_size
        sharing = list(layouts(config.parallel)) if device.type == "cpu" else [layout]
        # Of engine cores in lock step none loads before all are there: they fill the memory together, too.
        loading = sharing
        if device.type == "cpu":
            loading = [rank for core in _cores_together(config) for rank in layouts(core)]
        weights_bytes = {rank: weights_bytes_of(hf_config, dtype, rank) for rank in loading}
        self.weights_bytes = weights_bytes[layout]
        self.shared_weights_bytes = sum(weights_bytes.values())
        self.kv_cache_spec = self._kv_cache_spec(layout)
        self.shared_page_size_bytes = sum(self._kv_cache_spec(rank).page_size_bytes for rank in sharing)
        """Bytes of a block in the KV caches of all of them."""
        self.place = _describe(device, layout, len(loading))
        """The device, and the ranks whose memory is meant; for messages."""

    def own_part(self, kv_cache_bytes: int) -> int:
        """This rank's part of KV caches of so many bytes altogether."""
        return kv_cache_bytes * self.kv_cache_spec.page_size_bytes // self.shared_page_size_bytes

    def _kv_cache_spec(self, rank: RankLayout) -> KVCacheSpec:
        """An encoder's has no layers."""
        if is_encoder(self._hf_config):
            return KVCacheSpec(0, 0, 0, self._dtype.itemsize, self._block_size)
        model = decoder_config(self._hf_config)
        shard = DecoderShard.of(model, rank)
        return KVCacheSpec(
            num_layers=shard.num_layers,
            num_kv_heads=shard.num_kv_heads,
            head_dim=model.head_dim,
            dtype_bytes=self._dtype.itemsize,
            block_size=self._block_size,
        )


def num_cores_here(config: EngineConfig) -> int:
    """Engine cores that share this machine's memory and processor, as far as one can know."""
    parallel = config.parallel
    return 1 if parallel.data_parallel_backend == "ray" else parallel.data_parallel_size


def _cores_together(config: EngineConfig) -> list[ParallelConfig]:
    """The engine cores that load their weights at one time on this machine, this one among them."""
    parallel = config.parallel
    if not config.lock_step or parallel.data_parallel_joins_later or num_cores_here(config) == 1:
        return [parallel]
    return [replace(parallel, data_parallel_rank=rank) for rank in range(parallel.data_parallel_size)]


def _describe(device: torch.device, layout: RankLayout, num_sharing: int) -> str:
    if num_sharing == layout.world_size == 1:
        return str(device)
    return f"{device} ({f'{num_sharing} workers together' if num_sharing > 1 else f'worker {layout}'})"
