"""Attention and cache write in plain torch, for devices without their own kernels."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.torch.latent_attention import TorchLatent


class TorchKernels(TorchLatent):
    """Kernels that gather what each request sees of its cache into a dense tensor and call torch's attention, or,
    with a soft cap or sinks, compute it of torch's operations.

    On the CPU the arithmetic is float32: torch's attention over bfloat16 is far slower there at decode.
    """

    name = "torch"
    keys_transposed = False

    def warm_up(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        options: AttentionOptions | None = None,
    ) -> None:
        """Do nothing: there is nothing to compile."""

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
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.Kernels.paged_attention`."""
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = metadata.num_decodes
        if decodes:
            output[:decodes] = self._decode(query[:decodes], kv_cache, metadata, options)
        if decodes < metadata.num_reqs:
            starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            for request in range(decodes, metadata.num_reqs):
                tokens = slice(starts[request], starts[request + 1])
                table = metadata.block_table[request : request + 1]
                output[tokens] = self._prefill(query[tokens], kv_cache, table, seq_lens[request], options)
        return output

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Compute all decoding requests at once, padded to the one that sees the most blocks."""
        count, block_size = metadata.num_decodes, kv_cache.shape[3]
        most = -(-metadata.max_seq_len // block_size)
        if options.span is not None:
            most = min(most, -(-(options.span - 1) // block_size) + 1)
        lengths = metadata.seq_lens[:count, None].long()
        first = options.first_seen(lengths - 1)
        positions = torch.arange(most * block_size, device=query.device) + first // block_size * block_size
        seen = (positions >= first) & (positions < lengths)
        # Past the end of a table there is nothing to see; what is not seen is read from block 0.
        columns = (positions[:, ::block_size] // block_size).clamp(max=metadata.block_table.shape[1] - 1)
        table = metadata.block_table[:count].long().gather(1, columns)
        table = table * seen.view(count, most, block_size).any(2)
        keys, values = (
            torch.where(seen[:, None, :, None], self._gather(cache, table), 0) for cache in kv_cache
        )
        queries = self._widen(query).unsqueeze(2)
        return _attend(queries, keys, values, seen[:, None, None, :], options).squeeze(2)

    def _prefill(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        table: torch.Tensor,
        seq_len: int,
        options: AttentionOptions,
    ) -> torch.Tensor:
        query_len, block_size = query.shape[0], kv_cache.shape[3]
        first_block = options.first_seen(seq_len - query_len) // block_size
        blocks = table[:, first_block : -(-seq_len // block_size)].long()
        start = first_block * block_size
        keys, values = (self._gather(cache, blocks)[:, :, : seq_len - start] for cache in kv_cache)
        mask = None
        if seq_len > query_len or options.span is not None:
            keys_at = torch.arange(start, seq_len, device=query.device)
            queries_at = torch.arange(seq_len - query_len, seq_len, device=query.device)[:, None]
            mask = (keys_at <= queries_at) & (keys_at >= options.first_seen(queries_at))
        queries = self._widen(query).transpose(0, 1).unsqueeze(0)
        return _attend(queries, keys, values, mask, options).squeeze(0).transpose(0, 1)

    def _gather(self, cache: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return [n, num_kv_heads, blocks * block_size, head_dim] from one half of the cache and [n,
        blocks]."""
        dense = self._widen(cache[table]).transpose(1, 2)
        return dense.reshape(len(table), cache.shape[1], -1, cache.shape[3])

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.device.type == "cpu" else tensor


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attend with query [n, num_heads, queries, head_dim], keys and values [n, num_kv_heads, tokens, head_dim];
    `mask`, True for what is seen, goes with [n, num_heads, queries, tokens]; None: as many tokens as queries, each of
    which sees itself and those before it."""
    if options.soft_cap is None and options.sinks is None:
        return scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=mask is None, scale=options.scale, enable_gqa=True
        )
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.repeat_interleave(group, dim=1) for part in (keys, values))
    scores = (query @ keys.transpose(2, 3)).float() * options.scale
    if options.soft_cap is not None:
        scores = (scores / options.soft_cap).tanh() * options.soft_cap
    if mask is None:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=3)
    weights = scores.softmax(dim=3)[..., : keys.shape[2]]
    return weights.to(values.dtype) @ values
