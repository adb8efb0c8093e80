"""The attention block of layers that keep a latent of each token in place of keys and values (DeepSeek-AI, 2024,
DeepSeek-V2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.dense_kernels import select_dense
from nbengine.kernels.latent import LatentOptions
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.latent_config import LatentConfig
from nbengine.models.layers.basic import Linear, MergedLinear, RMSNorm, Rows
from nbengine.models.layers.parallel_layers import row_parallel_linear
from nbengine.models.layers.rotary import RotaryEmbedding
from nbengine.models.layers.weights import Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.kernels.attention_metadata import AttentionMetadata
    from nbengine.kernels.dispatch import Kernels

_EPS = 1e-6
"""The number that the norms of latents add to squares, whatever the configuration says of the others."""


class LatentAttention:
    """The projections, RoPE and attention of one layer, for the query heads of this rank; all ranks keep the same
    latents.

    Attention is computed in the space of the latents: the projection from latents to keys is multiplied into the
    queries, that to values into the results ("absorbed"), so that what is kept of a token is read once for all heads.
    """

    def __init__(
        self,
        config: DecoderConfig,
        latent: LatentConfig,
        rotary: RotaryEmbedding,
        place: Place,
        parallel: ParallelState,
    ) -> None:
        layout, hidden_size = parallel.layout, config.hidden_size
        self.num_heads = heads = config.num_heads // layout.tp_size
        self.latent = latent
        self.rotary = rotary
        self.query_latent: tuple[Linear, RMSNorm] | None = None
        query_name, query_size = "q_proj", hidden_size
        if latent.query_rank is not None:
            query_name, query_size = "q_b_proj", latent.query_rank
            down = Linear(hidden_size, query_size, bias=latent.bias, place=place.inside("q_a_proj"))
            self.query_latent = down, RMSNorm(query_size, _EPS, place)
        rows = heads * latent.head_dim
        part = Rows(query_name, rows, config.num_heads * latent.head_dim, layout.tp_rank * rows)
        self.query_proj = MergedLinear(query_size, [part], bias=False, place=place)
        down_place = place.inside("kv_a_proj_with_mqa")
        self.latent_proj = Linear(hidden_size, latent.width, bias=latent.bias, place=down_place)
        self.latent_norm = RMSNorm(latent.rank, _EPS, place)
        self._products = select_dense(place.device, place.dtype)
        self._hidden_dtype = place.hidden_dtype
        # Dense always: it is multiplied from both sides.
        each = latent.nope_dim + latent.value_dim
        self._up = WeightSlot(
            place.empty(heads * each, latent.rank),
            (config.num_heads * each, latent.rank),
            0,
            layout.tp_rank * heads * each,
        )
        self.o_proj = row_parallel_linear(
            config.num_heads * latent.value_dim,
            hidden_size,
            parallel=parallel,
            bias=latent.bias,
            place=place.inside("o_proj"),
        )
        scale = latent.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.options = LatentOptions(scale, latent.rank)

    def __call__(self, x: Tensor, angles: list[Tensor], cache: Tensor, attn: AttentionMetadata) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the attention block's output [T, hidden]; `angles` are
        those of the model's one rotary embedding, `cache` is the layer's [1, num_blocks, 1, block_size, width]."""
        latent, count = self.latent, len(x)
        sizes = (latent.nope_dim, latent.rope_dim)
        query, turning = self._queries(x).view(count, self.num_heads, -1).split_with_sizes(sizes, dim=2)
        content, key = self.latent_proj(x).split_with_sizes((latent.rank, latent.rope_dim), dim=1)
        turned = self.rotary.rotate(torch.cat((turning, key[:, None]), dim=1), angles[0])
        rows = torch.cat((self.latent_norm(content), turned[:, -1]), dim=1)
        attn.kernels.write_latent(rows, cache, attn.slot_mapping)
        keys, values = self.matrices()
        absorbed = torch.cat((self._by_head(query, keys), turned[:, :-1]), dim=2)
        found = attn.kernels.latent_attention(absorbed, cache, attn, self.options)
        return self.o_proj(self._by_head(found, values).flatten(1))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return what multiplies each head's queries into the space of latents, [heads, `nope_dim`, rank], and its
        results out of it, [heads, rank, `value_dim`]."""
        latent = self.latent
        keys, values = self._up.tensor.view(self.num_heads, -1, latent.rank).split_with_sizes(
            (latent.nope_dim, latent.value_dim), dim=1
        )
        return keys, values.transpose(1, 2)

    @property
    def is_compiled(self) -> bool:
        """Return whether the products with these matrices are functions that a program can call."""
        return self._products is not None and self._products.are_compiled

    def warm_up(self, kernels: Kernels, block_size: int) -> None:
        """Compile what a step needs."""
        self.rotary.warm_up(self.num_heads + 1)
        kernels.warm_up_latent(self.num_heads, self.latent.width, block_size, self.options)
        for matrix in self.matrices():
            self._by_head(matrix.new_zeros(1, *matrix.shape[:2], dtype=self._hidden_dtype), matrix)

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        if self.query_latent is not None:
            down, norm = self.query_latent
            yield from down.slots(f"{prefix}.q_a_proj")
            yield from norm.slots(f"{prefix}.q_a_layernorm")
        yield from self.query_proj.slots(prefix)
        yield from self.latent_proj.slots(f"{prefix}.kv_a_proj_with_mqa")
        yield from self.latent_norm.slots(f"{prefix}.kv_a_layernorm")
        yield f"{prefix}.kv_b_proj.weight", self._up
        yield from self.o_proj.slots(f"{prefix}.o_proj")

    def _queries(self, x: Tensor) -> Tensor:
        if self.query_latent is None:
            return self.query_proj(x)
        down, norm = self.query_latent
        return self.query_proj(norm(down(x)))

    def _by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply the rows x [T, heads, n] of each head with its matrix [heads, n, m]; return [T, heads, m]."""
        if self._products is not None:
            return self._products.by_head(x, weight)
        return torch.bmm(x.transpose(0, 1).to(weight.dtype), weight).transpose(0, 1).to(x.dtype)
