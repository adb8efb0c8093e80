"""The KV cache: its size and its sharing."""

from __future__ import annotations

from dataclasses import dataclass

from nbengine.checks import one_of, require

KV_CACHE_DTYPES = ("auto", "int8")


@dataclass(frozen=True)
class CacheConfig:
    """Size of the block pool. `num_gpu_blocks_override` wins over `kv_cache_memory_bytes`, which wins over
    the share of the device's memory (`gpu_memory_utilization`).

    `kv_cache_memory_bytes` is the size of the KV cache on each GPU, or in a CPU's memory, however many
    workers share it.

    `kv_cache_dtype` is "auto", with which keys and values have the type of the model's dense weights or are float16
    (`nbengine.models.loading.resolve_precision`), or "int8", which rounds them to 8 bits.
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"

    def __post_init__(self) -> None:
        one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        size = self.block_size
        require(
            "block_size", size, 1 <= size <= 256 and size & (size - 1) == 0, "a power of two from 1 to 256"
        )
        share = self.gpu_memory_utilization
        require("gpu_memory_utilization", share, 0 < share <= 1, "in (0, 1]")
        for name, limit in (("kv_cache_memory_bytes", 63), ("num_gpu_blocks_override", 31)):
            value = getattr(self, name)
            require(name, value, value is None or value >= 1, "at least 1, or None")
            require(name, value, value is None or value < 2**limit, f"below 2**{limit}, or None")
