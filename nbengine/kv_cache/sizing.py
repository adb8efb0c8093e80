"""How many KV blocks there are, decided once at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.config import CacheConfig
from nbengine.errors import EngineStartError
from nbengine.units import size


@dataclass(frozen=True)
class KVCacheSpec:
    """What a token leaves in the KV cache: one key and one value a layer and KV head."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: `block_size` tokens, keys and values, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes * self.block_size


def num_blocks_for(spec: KVCacheSpec, cache_config: CacheConfig, available_bytes: int) -> int:
    """Return the number of blocks that a worker has room for, 0 for a model without a KV cache.

    `num_gpu_blocks_override` wins over `available_bytes`, which the worker may take: what it found, or its part of
    `kv_cache_memory_bytes`.

    Raises:
        EngineStartError: there is not room for a single block.
    """
    if not spec.page_size_bytes:
        return 0
    if cache_config.num_gpu_blocks_override is not None:
        return cache_config.num_gpu_blocks_override
    num_blocks = available_bytes // spec.page_size_bytes
    if num_blocks < 1:
        is_given = cache_config.kv_cache_memory_bytes is not None
        source = "kv_cache_memory_bytes" if is_given else "gpu_memory_utilization or kv_cache_memory_bytes"
        raise EngineStartError(
            f"no room for the KV cache: {size(available_bytes)} is available to it, and one block of "
            f"{spec.block_size} tokens takes {size(spec.page_size_bytes)}; raise {source}, or lower block_size"
        )
    return num_blocks


def check_max_model_len(
    page_size_bytes: int, cache_config: CacheConfig, num_blocks: int, max_model_len: int
) -> None:
    """Check that one request of the greatest length fits in the pool.

    `page_size_bytes` are those of a block in what `kv_cache_memory_bytes` is about.

    Raises:
        EngineStartError: it does not; the message says what fits and which argument to change.
    """
    num_needed = -(-max_model_len // cache_config.block_size)
    if num_needed <= num_blocks:
        return
    if cache_config.num_gpu_blocks_override is not None:
        remedy = f"raise num_gpu_blocks_override to at least {num_needed}"
    elif cache_config.kv_cache_memory_bytes is not None:
        remedy = f"raise kv_cache_memory_bytes to at least {num_needed * page_size_bytes}"
    else:
        remedy = "raise gpu_memory_utilization or set kv_cache_memory_bytes"
    raise EngineStartError(
        f"max_model_len={max_model_len} needs {num_needed} KV blocks of {cache_config.block_size} tokens "
        f"({size(num_needed * page_size_bytes)}), but the KV cache has {num_blocks} "
        f"({size(num_blocks * page_size_bytes)}); lower max_model_len to at most "
        f"{num_blocks * cache_config.block_size}, or {remedy}"
    )
