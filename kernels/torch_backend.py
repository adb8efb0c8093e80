"""Attention and cache write in plain torch, for devices that have no kernels of their own."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from nbengine.worker.attention_metadata import AttentionMetadata


class TorchKernels:
    """Gathers each request's cache into a dense tensor and calls torch's attention.

    On the CPU the arithmetic is float32: torch's attention over bfloat16 is far slower there at decode.
    """

    name = "torch"
    keys_transposed = False

    def warm_up(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        """Nothing to compile."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """See `nbengine.kernels.dispatch.Kernels.write_kv`."""
        block_size = kv_cache.shape[3]
        valid = slot_mapping >= 0
        slots = slot_mapping[valid]
        blocks, offsets = slots // block_size, slots % block_size
        kv_cache[0][blocks, :, offsets] = key[valid]
        kv_cache[1][blocks, :, offsets] = value[valid]

    def paged_attention(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.Kernels.paged_attention`."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = metadata.num_decodes
        if decodes:
            output[:decodes] = self._decode(query[:decodes], kv_cache, metadata, scale)
        if decodes < metadata.num_reqs:
            starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            for request in range(decodes, metadata.num_reqs):
                tokens = slice(starts[request], starts[request + 1])
                table = metadata.block_table[request : request + 1]
                output[tokens] = self._prefill(query[tokens], kv_cache, table, seq_lens[request], scale)
        return output

    def _decode(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float
    ) -> torch.Tensor:
        """All decoding requests at once, padded to the longest."""
        count, block_size = metadata.num_decodes, kv_cache.shape[3]
        table = metadata.block_table[:count, : -(-metadata.max_seq_len // block_size)].long()
        positions = torch.arange(table.shape[1] * block_size, device=query.device)
        seen = positions < metadata.seq_lens[:count, None]
        table = table * seen[:, ::block_size]
        keys, values = (
            torch.where(seen[:, None, :, None], self._gather(cache, table), 0) for cache in kv_cache
        )
        attended = scaled_dot_product_attention(
            self._widen(query).unsqueeze(2),
            keys,
            values,
            attn_mask=seen[:, None, None, :],
            scale=scale,
            enable_gqa=True,
        )
        return attended.squeeze(2)

    def _prefill(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_len: int,
        scale: float,
    ) -> torch.Tensor:
        query_len = query.shape[0]
        blocks = table[:, : -(-seq_len // kv_cache.shape[3])].long()
        keys, values = (self._gather(cache, blocks)[:, :, :seq_len] for cache in kv_cache)
        whole = seq_len == query_len
        mask = None
        if not whole:
            mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
            mask = mask.tril(seq_len - query_len)
        attended = scaled_dot_product_attention(
            self._widen(query).transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=True,
        )
        return attended.squeeze(0).transpose(0, 1)

    def _gather(self, cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[n, num_kv_heads, blocks * block_size, head_dim] from one half of the cache and [n, blocks]."""
        dense = self._widen(cache[table]).transpose(1, 2)
        return dense.reshape(len(table), cache.shape[1], -1, cache.shape[3])

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.device.type == "cpu" else tensor
