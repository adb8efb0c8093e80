"""Attention over latents in torch's matrix products, which do most of the work here: there is one row a token for all
heads, so that the products are large, and each row is read once for all of them.

Rows are gathered a chunk of tokens at a time, with the online softmax of FlashAttention (Dao et al., 2022). Arithmetic
is float32, and chunks begin at multiples of their size, so that sums are cut at the same places in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.latent import LatentOptions

CHUNK = 256
"""The cached tokens that are gathered at a time, or one block, if that has more."""
_TILE_ROWS = 4096
"""The most rows of scores that are computed at a time; a row is a query token with one head."""


class TorchLatent:
    """Kernels for a cache of any floating-point type on any device."""

    def warm_up_latent(self, num_heads: int, width: int, block_size: int, options: LatentOptions) -> None:
        """Do nothing: there is nothing to compile."""

    def write_latent(self, rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
        """See `nbengine.kernels.latent.LatentKernels.write_latent`."""
        valid = slot_mapping >= 0
        cache.view(-1, cache.shape[4])[slot_mapping[valid]] = rows[valid].to(cache.dtype)

    def latent_attention(
        self, query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: LatentOptions
    ) -> Tensor:
        """See `nbengine.kernels.latent.LatentKernels.latent_attention`."""
        output = query.new_empty(*query.shape[:2], options.rank)
        decodes = metadata.num_decodes
        if decodes:
            output[:decodes] = _decode(query[:decodes], cache, metadata, options)
        if decodes < metadata.num_reqs:
            starts, seq_lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
            for request in range(decodes, metadata.num_reqs):
                first, last = starts[request], starts[request + 1]
                each = max(1, _TILE_ROWS // query.shape[1])
                for start in range(first, last, each):
                    stop = min(start + each, last)
                    table = metadata.block_table[request]
                    position = seq_lens[request] - last + start
                    output[start:stop] = _prefill(query[start:stop], cache, table, position, options)
        return output


class _Softmax:
    """The running maximum, total and weighted sums of some rows of queries, [..., 1] and [..., rank]."""

    def __init__(self, query: Tensor, options: LatentOptions) -> None:
        self._rank = options.rank
        self._query = query.float() * options.scale
        shape = query.shape[:-1]
        self._maximum = self._query.new_full((*shape, 1), -torch.inf)
        self._total = self._query.new_zeros((*shape, 1))
        self._sums = self._query.new_zeros((*shape, options.rank))

    def add(self, rows: Tensor, hidden: Tensor | None, count: int | None = None) -> None:
        """Take in tokens' rows [..., tokens, width], float32, of which every query sees at least one; `hidden`, True
        for what is not seen, goes with scores [..., queries, tokens]. `count`: only the first queries take part."""
        part = slice(count)
        scores = self._query[part] @ rows.transpose(-1, -2)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        peak = torch.maximum(self._maximum[part], scores.amax(-1, keepdim=True))
        weights = scores.sub_(peak).exp_()
        decay = (self._maximum[part] - peak).exp_()
        self._total[part] = self._total[part] * decay + weights.sum(-1, keepdim=True)
        self._sums[part] = self._sums[part] * decay + weights @ rows[..., : self._rank]
        self._maximum[part] = peak

    def result(self) -> Tensor:
        """Return the averages of the values, [..., rank]."""
        return self._sums / self._total


def _decode(query: Tensor, cache: Tensor, metadata: AttentionMetadata, options: LatentOptions) -> Tensor:
    """Compute all decoding requests together, chunk by chunk; each takes part in those that it has."""
    count, block_size = metadata.num_decodes, cache.shape[3]
    lengths, order = metadata.seq_lens[:count].sort(descending=True, stable=True)
    table, longest = metadata.block_table[:count].long()[order], lengths.tolist()
    softmax = _Softmax(query[order], options)
    chunk = max(CHUNK, block_size)
    for first in range(0, longest[0], chunk):
        taking = sum(length > first for length in longest)
        tokens = min(chunk, longest[0] - first)
        columns = slice(first // block_size, -(-(first + tokens) // block_size))
        blocks = table[:taking, columns]
        at = torch.arange(blocks.shape[1] * block_size, device=query.device) + first
        hidden = at >= lengths[:taking, None]
        # What is not there is read from block 0.
        blocks = blocks.masked_fill(hidden[:, ::block_size], 0)
        rows = cache[0, :, 0][blocks].flatten(1, 2).float()
        is_cut = longest[taking - 1] < int(at[-1]) + 1
        if is_cut:
            rows.masked_fill_(hidden[:, :, None], 0)
        softmax.add(rows, hidden[:, None] if is_cut else None, taking)
    found = softmax.result()
    return torch.empty_like(found).index_copy_(0, order, found)


def _prefill(query: Tensor, cache: Tensor, table: Tensor, position: int, options: LatentOptions) -> Tensor:
    """Compute queries [T, num_heads, width] of one request, the first one at `position`."""
    count, heads, _ = query.shape
    block_size, seq_len = cache.shape[3], position + count
    softmax = _Softmax(query.flatten(0, 1), options)
    queries_at = torch.arange(position, seq_len, device=query.device).repeat_interleave(heads)
    chunk = max(CHUNK, block_size)
    for first in range(0, seq_len, chunk):
        last = min(first + chunk, seq_len)
        blocks = table[first // block_size : -(-last // block_size)].long()
        rows = cache[0, :, 0][blocks].flatten(0, 1)[: last - first].float()
        hidden = None
        if last > position + 1:
            hidden = torch.arange(first, last, device=query.device) > queries_at[:, None]
        softmax.add(rows, hidden)
    return softmax.result().view(count, heads, -1)
