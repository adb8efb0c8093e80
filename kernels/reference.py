"""What the kernels must compute, as plainly as torch can say it: the oracle of their tests."""

from __future__ import annotations

import torch

from nbengine.worker.attention_metadata import AttentionMetadata


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    keys_transposed: bool = False,
) -> None:
    """Reference for `Kernels.write_kv`, one token at a time."""
    block_size = kv_cache.shape[3]
    keys = rows_of_keys(kv_cache, keys_transposed)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            keys[block, :, offset] = key[token]
            kv_cache[1, block, :, offset] = value[token]


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    *,
    keys_transposed: bool = False,
) -> torch.Tensor:
    """Reference for `Kernels.paged_attention`, in float64, one request at a time; the result is float64."""
    keys, values = rows_of_keys(kv_cache, keys_transposed), kv_cache[1]
    num_heads, block_size = query.shape[1], kv_cache.shape[3]
    output = torch.full(query.shape, float("nan"), dtype=torch.float64, device=query.device)
    for request in range(metadata.num_reqs):
        start, stop = metadata.query_start_loc[request : request + 2].tolist()
        seq_len = int(metadata.seq_lens[request])
        slots = [
            (int(metadata.block_table[request, position // block_size]), position % block_size)
            for position in range(seq_len)
        ]
        dense_keys, dense_values = (
            torch.stack([half[block, :, offset] for block, offset in slots], dim=1)
            .double()
            .repeat_interleave(num_heads // half.shape[1], dim=0)
            for half in (keys, values)
        )
        queries = query[start:stop].double().transpose(0, 1)
        scores = queries @ dense_keys.transpose(1, 2) * scale
        positions = torch.arange(seq_len, device=query.device)
        hidden = positions[None, :] > positions[seq_len - (stop - start) :, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        output[start:stop] = (weights @ dense_values).transpose(0, 1)
    return output


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """Reference for `ExpertKernels.experts`, in float64, one token and expert at a time; the result is float64."""
    output = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            if expert < len(down):
                gate, up = (gate_up[expert].double() @ row).chunk(2)
                output[token] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return output


def rows_of_keys(kv_cache: torch.Tensor, keys_transposed: bool) -> torch.Tensor:
    """The keys as a view [num_blocks, num_kv_heads, block_size, head_dim], however they are stored."""
    keys = kv_cache[0]
    if not keys_transposed:
        return keys
    blocks, kv_heads, block_size, head_dim = keys.shape
    return keys.view(blocks, kv_heads, head_dim, block_size).transpose(2, 3)
