"""The memory of a layer's KV cache: its shape, and the bytes that a token takes in it.

An int8 cache holds each head of a token's key as whole numbers from -127 to 127 with one scale, and its value
likewise, with a scale of its own. A scale for each token and head is finer than one for a block, and a token's
bytes follow from its own key and value alone: not from its neighbours in the block, nor from the chunks in which
its prompt was computed.

Scales are float32. On normal numbers float16 rounds as well (an error of 0.59 % of their standard deviation with
heads of 64 channels), but loses heads whose numbers are below 1e-4, and needs a processor that converts it.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4
_NUMBERS_OF_A_PLACE = 256
LEVELS = 127.0
"""The whole number that stands for the largest number of a head."""
LEAST_LARGEST = 2.0**-100
"""The number that takes the place of a head's largest one where that is smaller, so that a scale and its inverse
stay normal numbers."""


def head_width(dtype: torch.dtype, head_dim: int) -> int:
    """Return the elements that one head of a token's key, or value, takes: its channels and, in an int8 cache, its
    scale, which lies at a multiple of its own size."""
    return int8_head_width(head_dim) if dtype is torch.int8 else head_dim


def int8_head_width(head_dim: int) -> int:
    """Return the `head_width` of an int8 cache, in bytes.

    A head of 512 numbers has room for two scales, of which one is used. So it is exactly twice as wide as a head of 256,
    and layers with heads of both sizes share blocks (Gemma 4).
    """
    numbers = -(-head_dim // SCALE_BYTES) * SCALE_BYTES
    return numbers + -(-head_dim // _NUMBERS_OF_A_PLACE) * SCALE_BYTES


def cache_shape(
    dtype: torch.dtype, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, parts: int = 2
) -> tuple[int, int, int, int, int]:
    """Return the shape of a layer's KV cache of type `dtype`: index 0 holds keys, 1 values, and a block's part of
    one KV head is one piece of memory. A cache of latents has one of two `parts`."""
    return parts, num_blocks, num_kv_heads, block_size, head_width(dtype, head_dim)
