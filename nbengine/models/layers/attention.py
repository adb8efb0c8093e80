"""Attention over the paged KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from nbengine.kernels.attention_options import AttentionOptions

if TYPE_CHECKING:
    from nbengine.kernels.attention_metadata import AttentionMetadata
    from nbengine.kernels.dispatch import Kernels


class Attention:
    """Causal attention of a flattened batch: the new keys and values go into their slots of the cache, and
    every query attends to those of its own request's keys that `options` let it see."""

    __slots__ = ("head_dim", "num_heads", "num_kv_heads", "options")

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, options: AttentionOptions) -> None:
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.options = options

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn: AttentionMetadata
    ) -> Tensor:
        """Attend with query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim] (views with
        strides are fine) and kv_cache [2, num_blocks, num_kv_heads, block_size, head_dim]; return [T,
        num_heads, head_dim]."""
        attn.kernels.write_kv(key, value, kv_cache, attn.slot_mapping)
        return self.read(query, kv_cache, attn)

    def read(self, query: Tensor, kv_cache: Tensor, attn: AttentionMetadata) -> Tensor:
        """Attend with query [T, num_heads, head_dim] to keys and values that are in the cache."""
        return attn.kernels.paged_attention(query, kv_cache, attn, self.options)


def warm_up_attention(layers: Iterable[Attention], kernels: Kernels, block_size: int) -> None:
    """Compile what layers with more than a scale in their options need, each kind once."""
    done = set()
    for layer in layers:
        options = layer.options
        features = (options.window, options.chunk, options.soft_cap, options.sinks)
        kind = (layer.num_heads, layer.num_kv_heads, layer.head_dim, *(each is None for each in features))
        if not options.is_plain and kind not in done:
            kernels.warm_up(layer.num_heads, layer.num_kv_heads, layer.head_dim, block_size, options)
            done.add(kind)
