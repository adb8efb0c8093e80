"""Attention and cache write on CUDA devices, through Triton."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nbengine.kernels.attention_metadata import AttentionMetadata, build_attention_metadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.kv_cache import cache_shape
from nbengine.kernels.latent import LatentOptions
from nbengine.kernels.triton.latent_attention import latent_attention, write_latent
from nbengine.kernels.triton.latent_attention import warm_up_merges as warm_up_latent_merges
from nbengine.kernels.triton.paged_attention import paged_attention, warm_up_merges
from nbengine.kernels.triton.write_kv import write_kv

_WARM_UP_CASES = ((1, 1), (1, 4096), (2, 2))  # (query_len, seq_len): decode, decode in splits, prefill


class TritonKernels:
    """Kernels for a float32, bfloat16 or float16 model on one CUDA device."""

    name = "triton"
    keys_transposed = False

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def warm_up(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        options: AttentionOptions | None = None,
    ) -> None:
        """Run each kernel once on zeros, which compiles it, or loads it from Triton's cache."""
        shape = cache_shape(self._dtype, 1, num_kv_heads, block_size, head_dim)
        cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        options = options or AttentionOptions(1.0)
        for metadata, query in self._warm_up_steps(num_heads, head_dim, block_size):
            self.write_kv(query[:, :num_kv_heads], query[:, :num_kv_heads], cache, metadata.slot_mapping)
            self.paged_attention(query, cache, metadata, options)
        warm_up_merges(query[:1], num_kv_heads, options)
        torch.cuda.synchronize(self._device)

    def warm_up_latent(self, num_heads: int, width: int, block_size: int, options: LatentOptions) -> None:
        """See `nbengine.kernels.latent.LatentKernels.warm_up_latent`."""
        shape = cache_shape(self._dtype, 1, 1, block_size, width, parts=1)
        cache = torch.zeros(shape, dtype=self._dtype, device=self._device)
        for metadata, query in self._warm_up_steps(num_heads, width, block_size):
            self.write_latent(query[:, 0], cache, metadata.slot_mapping)
            self.latent_attention(query, cache, metadata, options)
        warm_up_latent_merges(query[:1], options.rank)
        torch.cuda.synchronize(self._device)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See `nbengine.kernels.dispatch.Kernels.write_kv`."""
        write_kv(_rows(key), _rows(value), kv_cache, slot_mapping)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.Kernels.paged_attention`."""
        return paged_attention(_rows(query), kv_cache, metadata, options, self._processors)

    def write_latent(self, rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """See `nbengine.kernels.latent.LatentKernels.write_latent`."""
        write_latent(rows if rows.stride(1) == 1 else rows.contiguous(), cache, slot_mapping)

    def latent_attention(
        self,
        query: torch.Tensor,
        cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: LatentOptions,
    ) -> torch.Tensor:
        """See `nbengine.kernels.latent.LatentKernels.latent_attention`."""
        return latent_attention(query.contiguous(), cache, metadata, options, self._processors)

    def _warm_up_steps(
        self, num_heads: int, head_dim: int, block_size: int
    ) -> Iterator[tuple[AttentionMetadata, torch.Tensor]]:
        """Yield a step of each kind, and its queries, which are zeros."""
        for query_len, seq_len in _WARM_UP_CASES:
            metadata = build_attention_metadata(
                np.array([query_len], np.int32),
                np.array([seq_len], np.int32),
                np.zeros((1, -(-seq_len // block_size)), np.int32),
                block_size=block_size,
                kernels=self,
                device=self._device,
            )
            yield (
                metadata,
                torch.zeros((query_len, num_heads, head_dim), dtype=self._dtype, device=self._device),
            )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.contiguous()
