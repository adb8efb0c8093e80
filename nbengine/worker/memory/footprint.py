"""The part of a memory that its ranks take: one rank takes that of its GPU, all ranks of an engine that of a
CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from nbengine.config import EngineConfig, ParallelConfig
from nbengine.distributed.layout import RankLayout, layouts
from nbengine.kv_cache.sizing import RankCacheSpec, longest_step
from nbengine.kv_cache.specs import make_groups
from nbengine.models.configs.encoder_config import any_encoder_config, is_encoder
from nbengine.models.loading import Precision, weights_bytes_of
from nbengine.models.registry import decoder_config
from nbengine.models.sharding import DecoderShard
from nbengine.worker.memory.cache_rows import CacheRows
from nbengine.worker.memory.extras import GATHERED_BYTES, decoder_extras, pooling_extras

_BLOCKS_PER_SLOT = 16
"""A guess of how many blocks there are for each slot, where a memory is divided among unlike pipeline stages."""
_SLOTS_PER_SEQUENCE = 4
"""Slots that a request makes use of: its own, and those of its checkpoints that are most likely found."""


class Footprint:
    """The memory that one rank takes (`weights_bytes`, `kv_cache_spec`), and that of all ranks that share
    it."""

    def __init__(
        self,
        config: EngineConfig,
        hf_config: Mapping[str, Any],
        device: torch.device,
        precision: Precision,
        layout: RankLayout,
    ) -> None:
        self._config = config
        self._hf_config = hf_config
        self._kv_dtype = precision.kv_dtype
        self._block_size = config.cache.block_size
        sharing = list(layouts(config.parallel)) if device.type == "cpu" else [layout]
        # Engine cores in lock step load only when all are there, so that they fill the memory together, too.
        loading = sharing
        if device.type == "cpu":
            loading = [rank for core in _cores_together(config) for rank in layouts(core)]
        weights_bytes = {
            rank: weights_bytes_of(hf_config, precision.dtype, rank, precision.packed) for rank in loading
        }
        self.weights_bytes = weights_bytes[layout]
        self.shared_weights_bytes = sum(weights_bytes.values())
        self.kv_cache_spec = self._kv_cache_spec(layout)
        self.shared_page_size_bytes = sum(self._kv_cache_spec(rank).page_size_bytes for rank in sharing)
        """The bytes of a block in the KV caches of all of them."""
        self.shared_slot_bytes = sum(self._kv_cache_spec(rank).slot_bytes for rank in sharing)
        """The bytes of a slot for recurrent state in all of them."""
        self._num_sampling = sum(rank.pp_rank == rank.pp_size - 1 for rank in sharing)
        self.place = _describe(device, layout, len(loading))
        """The device and the ranks that share it, for messages."""

    def own_part(self, kv_cache_bytes: int) -> int:
        """Return this rank's part of KV caches that take `kv_cache_bytes` together."""
        own, shared = self.kv_cache_spec, self.shared_page_size_bytes
        if not self.shared_slot_bytes:
            return kv_cache_bytes * own.page_size_bytes // shared
        # There are some blocks for each slot, as many for all ranks.
        weight = own.page_size_bytes * _BLOCKS_PER_SLOT + own.slot_bytes
        return kv_cache_bytes * weight // (shared * _BLOCKS_PER_SLOT + self.shared_slot_bytes)

    def sequence_bytes(self, max_model_len: int) -> int:
        """Return what a request of the greatest length takes in all ranks together, with some checkpoints."""
        groups, step_tokens = self.kv_cache_spec.groups, longest_step(self._config.scheduler)
        num_blocks = groups.most_blocks(max_model_len, self._block_size, step_tokens)
        return num_blocks * self.shared_page_size_bytes + _SLOTS_PER_SEQUENCE * self.shared_slot_bytes

    def longest(self, num_blocks: int, max_model_len: int) -> int:
        """Return the most tokens, up to `max_model_len`, of a request that has `num_blocks` for itself."""
        spec = self.kv_cache_spec
        if not spec.groups.num_tables or not self.shared_page_size_bytes:
            return max_model_len
        step_tokens = longest_step(self._config.scheduler)
        return spec.groups.longest(num_blocks, self._block_size, step_tokens, max_model_len)

    def extras_bytes(self, max_model_len: int) -> int:
        """Return what a full batch may ask for beside the KV cache, in all ranks together; see
        `nbengine.worker.memory.extras`."""
        scheduler = self._config.scheduler
        if is_encoder(self._hf_config):
            hidden_size = any_encoder_config(self._hf_config).hidden_size
            return self._num_sampling * pooling_extras(scheduler, hidden_size, max_model_len)
        model = decoder_config(self._hf_config)
        each = decoder_extras(scheduler, model.vocab_size, model.hidden_size, max_model_len)
        return self._num_sampling * each

    def kv_cache_part(self, num_bytes: int) -> int:
        """Return the part of `num_bytes` that may be KV cache: the rest is for the log probabilities of the
        prompts in it."""
        page = self.shared_page_size_bytes
        if not page:
            return num_bytes
        gathered = self._num_sampling * self._block_size * GATHERED_BYTES
        return num_bytes * page // (page + gathered)

    def _kv_cache_spec(self, rank: RankLayout) -> RankCacheSpec:
        """Return what a block takes in a rank's KV cache; the cache of an encoder has no layers."""
        if is_encoder(self._hf_config):
            return RankCacheSpec(0, 0, 0, self._kv_dtype.itemsize, self._block_size)
        model = decoder_config(self._hf_config)
        shard = DecoderShard.of(model, rank)
        rules = model.cache_rules()
        groups = make_groups(rules)
        state_bytes = sum(rules[layer].size for layer in shard.layers if rules[layer].kind == "recurrent")
        return RankCacheSpec(
            num_layers=groups.num_tensors(shard.layers),
            num_kv_heads=1,
            head_dim=CacheRows.of(model, rank, self._kv_dtype, groups).widest,
            dtype_bytes=self._kv_dtype.itemsize,
            block_size=self._block_size,
            groups=groups,
            slot_bytes=state_bytes // rank.tp_size,
            parts=model.cache_parts,
        )


def num_cores_here(config: EngineConfig) -> int:
    """Count the engine cores that share this machine's memory and processor; with Ray this one counts alone,
    as the places of the others are not known."""
    parallel = config.parallel
    return 1 if parallel.data_parallel_backend == "ray" else parallel.data_parallel_size


def _cores_together(config: EngineConfig) -> list[ParallelConfig]:
    """List the engine cores that load their weights at the same time on this machine, this one among them."""
    parallel = config.parallel
    if not config.lock_step or parallel.data_parallel_joins_later or num_cores_here(config) == 1:
        return [parallel]
    return [replace(parallel, data_parallel_rank=rank) for rank in range(parallel.data_parallel_size)]


def _describe(device: torch.device, layout: RankLayout, num_sharing: int) -> str:
    if num_sharing == layout.world_size == 1:
        return str(device)
    return f"{device} ({f'{num_sharing} workers together' if num_sharing > 1 else f'worker {layout}'})"
