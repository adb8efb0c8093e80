"""Attention and cache write on CUDA devices, through Triton."""

from __future__ import annotations

import numpy as np
import torch

from nbengine.kernels.paged_attention_triton import paged_attention
from nbengine.kernels.write_kv_triton import write_kv
from nbengine.worker.attention_metadata import AttentionMetadata, build_attention_metadata

_WARM_UP_CASES = ((1, 1), (1, 4096), (2, 2))  # (query_len, seq_len): decode, decode in splits, prefill


class TritonKernels:
    """Kernels for a float32, bfloat16 or float16 model on one CUDA device."""

    name = "triton"
    keys_transposed = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def warm_up(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        """Run each kernel once on zeros, which compiles it, or loads it from Triton's cache."""
        cache = torch.zeros(
            (2, 1, num_kv_heads, block_size, head_dim), dtype=self._dtype, device=self._device
        )
        for query_len, seq_len in _WARM_UP_CASES:
            blocks = -(-seq_len // block_size)
            metadata = build_attention_metadata(
                np.array([query_len], np.int32),
                np.array([seq_len], np.int32),
                np.zeros((1, blocks), np.int32),
                block_size=block_size,
                kernels=self,
                device=self._device,
            )
            query = torch.zeros((query_len, num_heads, head_dim), dtype=self._dtype, device=self._device)
            self.write_kv(query[:, :num_kv_heads], query[:, :num_kv_heads], cache, metadata.slot_mapping)
            self.paged_attention(query, cache, metadata, 1.0)
        torch.cuda.synchronize(self._device)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See `nbengine.kernels.dispatch.Kernels.write_kv`."""
        write_kv(_rows(key), _rows(value), kv_cache, slot_mapping)

    def paged_attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.Kernels.paged_attention`."""
        return paged_attention(_rows(query), kv_cache, metadata, scale, self._processors)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.contiguous()
