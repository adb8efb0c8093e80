"""Attention over the paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from nbengine.worker.attention_metadata import AttentionMetadata


class Attention:
    """Causal attention of a flattened batch: the new keys and values go into their slots of the cache, and
    every query attends to its own request's blocks."""

    __slots__ = ("head_dim", "num_heads", "num_kv_heads", "scale")

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.scale = scale

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn: AttentionMetadata
    ) -> Tensor:
        """Query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim] (views with strides are
        fine), kv_cache [2, num_blocks, num_kv_heads, block_size, head_dim]; gives [T, num_heads, head_dim]."""
        attn.kernels.write_kv(key, value, kv_cache, attn.slot_mapping)
        return attn.kernels.paged_attention(query, kv_cache, attn, self.scale)
