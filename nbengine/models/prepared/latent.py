"""The operations of layers with latent attention in a prepared step, between their projections."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.cpu.attention_functions import latent_group
from nbengine.kernels.cpu.head_products import head_operation
from nbengine.kernels.cpu.latent_rows import LatentRowArguments, LatentRowShape, compile_latent_rows
from nbengine.models.layers.attention import Attention
from nbengine.models.layers.latent_attention import LatentAttention
from nbengine.models.prepared.products import row_bytes
from nbengine.models.prepared.rows import Operation


@dataclass(frozen=True, slots=True)
class LatentBuffers:
    """The memory in which the operations of all layers with latents leave numbers for each other, float32."""

    query_latent: Tensor
    """[tokens, numbers of a query's latent]; 0 of them where queries have none."""
    projected: Tensor
    """[tokens, width], as the next one: a token's latent and key before they are normalised and turned, and after."""
    rows: Tensor
    queries: Tensor
    """[tokens, heads, numbers of a query]."""
    absorbed: Tensor
    """[tokens, heads, width]: queries in the space of latents."""
    found: Tensor
    """[tokens, heads, rank]: averages of latents."""

    @classmethod
    def make(cls, block: LatentAttention, tokens: int) -> LatentBuffers:
        """Allocate them for steps of up to `tokens`."""
        latent, heads = block.latent, block.num_heads
        return cls(
            query_latent=torch.empty(tokens, latent.query_rank or 0, dtype=torch.float32),
            projected=torch.empty(tokens, latent.width, dtype=torch.float32),
            rows=torch.empty(tokens, latent.width, dtype=torch.float32),
            queries=torch.empty(tokens, heads, latent.head_dim, dtype=torch.float32),
            absorbed=torch.empty(tokens, heads, latent.width, dtype=torch.float32),
            found=torch.empty(tokens, heads, latent.rank, dtype=torch.float32),
        )


def attention_of(block: LatentAttention) -> Attention:
    """Return the attention that a layer's functions compute: groups of query heads take the place of KV heads."""
    heads = block.num_heads
    options = AttentionOptions(block.options.scale)
    return Attention(heads, heads // latent_group(heads), block.latent.width, options)


def latent_rows(block: LatentAttention, buffers: LatentBuffers, positions: int) -> Operation:
    """Return the operation that normalises latents and turns keys and queries; `positions` is their address."""
    latent, norm, table = block.latent, block.latent_norm, block.rotary.table
    pairs = block.rotary.is_interleaved
    shape = LatentRowShape(block.num_heads, latent.nope_dim, latent.rope_dim, latent.rank, pairs)
    arguments = LatentRowArguments(
        queries=buffers.queries.data_ptr(),
        query_stride=row_bytes(buffers.queries),
        projected=buffers.projected.data_ptr(),
        projected_stride=row_bytes(buffers.projected),
        weight=norm.weight.data_ptr(),
        angles=table.data_ptr(),
        angle_stride=row_bytes(table),
        positions=positions,
        absorbed=buffers.absorbed.data_ptr(),
        absorbed_stride=row_bytes(buffers.absorbed),
        output=buffers.rows.data_ptr(),
        output_stride=row_bytes(buffers.rows),
        eps=norm.eps,
    )
    return Operation(compile_latent_rows(shape), arguments, 1)


def absorb(block: LatentAttention, buffers: LatentBuffers) -> Operation:
    """Return the operation that multiplies queries into the space of latents."""
    latent, (keys, _) = block.latent, block.matrices()
    queries = buffers.queries[..., : latent.nope_dim]
    return Operation(*head_operation(queries, keys, buffers.absorbed[..., : latent.rank]))


def release(block: LatentAttention, buffers: LatentBuffers, attended: Tensor) -> Operation:
    """Return the operation that multiplies averages of latents out of their space, to `attended` [tokens, all heads'
    values]."""
    _, values = block.matrices()
    output = attended.view(len(attended), block.num_heads, -1)
    return Operation(*head_operation(buffers.found, values, output))
