"""The results that the kernels must compute, as plainly as torch can say it: the oracle of their tests."""

from __future__ import annotations

import torch

from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.kv_cache import LEAST_LARGEST, LEVELS, SCALE_BYTES
from nbengine.kernels.latent import LatentOptions


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    keys_transposed: bool = False,
) -> None:
    """Do what `Kernels.write_kv` does."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept].long()
    blocks, offsets = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
    for half, (tensor, is_key) in enumerate([(key, True), (value, False)]):
        numbers, scales = rows_of(kv_cache[half], tensor.shape[2], is_key and keys_transposed)
        if scales is None:
            numbers[blocks, :, offsets] = tensor[kept].to(numbers.dtype)
        else:
            levels, largest = rounded_heads(tensor)
            numbers[blocks, :, offsets] = levels[kept]
            scales[blocks, :, offsets] = largest[kept]


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    *,
    keys_transposed: bool = False,
) -> torch.Tensor:
    """Do what `Kernels.paged_attention` does, in float64, one request at a time; the result is float64."""
    head_dim, num_heads, block_size = query.shape[2], query.shape[1], kv_cache.shape[3]
    halves = [
        rows_of(half, head_dim, is_key and keys_transposed)
        for half, is_key in zip(kv_cache, (True, False), strict=True)
    ]
    output = torch.full(query.shape, float("nan"), dtype=torch.float64, device=query.device)
    for request in range(metadata.num_reqs):
        start, stop = metadata.query_start_loc[request : request + 2].tolist()
        seq_len = int(metadata.seq_lens[request])
        first = options.first_seen(seq_len - (stop - start))
        keys_at = torch.arange(first, seq_len, device=query.device)
        blocks = metadata.block_table[request].long()[keys_at // block_size]
        dense_keys, dense_values = (
            _head_numbers(half, blocks, keys_at % block_size).repeat_interleave(
                num_heads // kv_cache.shape[2], dim=0
            )
            for half in halves
        )
        queries = query[start:stop].double().transpose(0, 1)
        scores = queries @ dense_keys.transpose(1, 2) * options.scale
        if options.soft_cap is not None:
            scores = (scores / options.soft_cap).tanh() * options.soft_cap
        queries_at = torch.arange(seq_len - (stop - start), seq_len, device=query.device)[:, None]
        hidden = (keys_at > queries_at) | (keys_at < options.first_seen(queries_at))
        scores = scores.masked_fill(hidden, float("-inf"))
        if options.sinks is not None:
            sinks = options.sinks.double()[:, None, None].expand(-1, stop - start, 1)
            scores = torch.cat((scores, sinks), dim=2)
        weights = scores.softmax(dim=-1)[..., : seq_len - first]
        output[start:stop] = (weights @ dense_values).transpose(0, 1)
    return output


def write_latent(rows: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Do what `LatentKernels.write_latent` does, one token at a time."""
    for row, slot in zip(rows, slot_mapping.tolist(), strict=True):
        if slot >= 0:
            block, offset = divmod(slot, cache.shape[3])
            cache[0, block, 0, offset] = row


def latent_attention(
    query: torch.Tensor, cache: torch.Tensor, metadata: AttentionMetadata, options: LatentOptions
) -> torch.Tensor:
    """Do what `LatentKernels.latent_attention` does: attention whose keys are the values, too; the result is
    float64."""
    both = cache.expand(2, -1, -1, -1, -1)
    found = paged_attention(query, both, metadata, AttentionOptions(options.scale))
    return found[..., : options.rank].contiguous()


def rounded_heads(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round heads [..., head_dim] as an int8 cache does: return whole numbers of the same shape, and scales [...]."""
    numbers = tensor.float()
    largest = numbers.abs().amax(-1).clamp(min=LEAST_LARGEST)
    finite = numbers.isfinite().all(-1)
    # A number divided by a tensor would be its inverse times the number, rounded twice.
    inverse = torch.full_like(largest, LEVELS) / largest
    levels = (numbers * inverse[..., None]).round().masked_fill(~finite[..., None], 0)
    return levels.to(torch.int8), torch.where(finite, largest / LEVELS, float("nan"))


def experts(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> torch.Tensor:
    """Do what `ExpertKernels.experts` does, in float64, one token and expert at a time; the result is
    float64."""
    output = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(x.double()):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            if expert < len(down):
                gate, up = (gate_up[expert].double() @ row).chunk(2)
                output[token] += weight * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return output


def rows_of(half: torch.Tensor, head_dim: int, transposed: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the keys, or the values, as a view [num_blocks, num_kv_heads, block_size, head_dim], however they are
    stored, and of an int8 cache the scales, float32 [num_blocks, num_kv_heads, block_size]."""
    blocks, kv_heads, block_size, _ = half.shape
    memory = half.view(blocks, kv_heads, -1)
    numbers = memory[..., : block_size * head_dim]
    if transposed:
        rows = numbers.view(blocks, kv_heads, head_dim, block_size).transpose(2, 3)
    else:
        rows = numbers.view(blocks, kv_heads, block_size, head_dim)
    if half.dtype is not torch.int8:
        return rows, None
    return rows, memory[..., -SCALE_BYTES * block_size :].view(torch.float32)


def rows_of_keys(kv_cache: torch.Tensor, keys_transposed: bool) -> torch.Tensor:
    """Return the keys of a cache without scales as `rows_of` does."""
    return rows_of(kv_cache[0], kv_cache.shape[4], keys_transposed)[0]


def _head_numbers(
    half: tuple[torch.Tensor, torch.Tensor | None], blocks: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """Return the heads [num_kv_heads, tokens, head_dim] of the tokens in these places, in float64."""
    rows, scales = half
    numbers = rows[blocks, :, offsets].double()
    if scales is not None:
        numbers *= scales[blocks, :, offsets, None].double()
    return numbers.transpose(0, 1)
