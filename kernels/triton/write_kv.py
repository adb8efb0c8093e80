"""The cache write in Triton."""

# mypy: disallow-untyped-decorators=False, disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["key_stride", "value_stride"])
def write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_stride,
    value_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Copy a token's KV_HEADS * HEAD_DIM keys and values: one program a token; WIDTH is the power of two
    above."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        column = tl.arange(0, WIDTH)
        inside = column < KV_HEADS * HEAD_DIM
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head = column // HEAD_DIM
        place = ((block * KV_HEADS + head) * BLOCK_SIZE + offset) * HEAD_DIM + column % HEAD_DIM
        keys = tl.load(key + token * key_stride + column, mask=inside)
        tl.store(key_cache + place, keys, mask=inside)
        values = tl.load(value + token * value_stride + column, mask=inside)
        tl.store(value_cache + place, values, mask=inside)


def write_kv(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """See `nbengine.kernels.dispatch.Kernels.write_kv`."""
    _, _, kv_heads, block_size, head_dim = kv_cache.shape
    write_kv_kernel[(slot_mapping.shape[0],)](
        key,
        value,
        kv_cache[0],
        kv_cache[1],
        slot_mapping,
        key.stride(0),
        value.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WIDTH=triton.next_power_of_2(kv_heads * head_dim),
        enable_fp_fusion=True,
    )
