"""The attention block of a decoder's layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.attention_options import AttentionOptions
from nbengine.kernels.row_kernels import select_pair_gate
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig
from nbengine.models.layers.attention import Attention
from nbengine.models.layers.basic import RMSNorm
from nbengine.models.layers.norms import WholeHeadsNorm
from nbengine.models.layers.parallel_layers import QKVParallelLinear, row_parallel_linear
from nbengine.models.layers.rotary import RotaryEmbedding
from nbengine.models.layers.weights import Place, Slots, WeightSlot
from nbengine.models.sharding import DecoderShard

if TYPE_CHECKING:
    from nbengine.kernels.attention_metadata import AttentionMetadata


class DecoderAttention:
    """The projections, RoPE and attention of one layer, for the heads of this rank; `layer` is what the layer has of
    its own, `rotaries` are the model's rotary embeddings, which know how many positions there are."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerConfig,
        rotaries: list[RotaryEmbedding],
        place: Place,
        parallel: ParallelState,
    ):
        shard, size = DecoderShard.of(config, parallel.layout), config.head_dim
        heads, kv_heads = shard.num_heads, shard.num_kv_heads
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            size,
            total_num_heads=config.num_heads,
            total_num_kv_heads=config.num_kv_heads,
            shard=shard,
            layout=parallel.layout,
            bias=config.attention_bias,
            place=place,
            query_parts=2 if config.attention_gate else 1,
            has_keys=layer.source is None,
        )
        self.reads_others = layer.source is not None
        """True if the keys and values are another layer's."""
        self.o_proj = row_parallel_linear(
            config.num_heads * size,
            config.hidden_size,
            parallel=parallel,
            bias=config.attention_out_bias,
            place=place.inside("o_proj"),
        )
        self.q_norm, self.k_norm = _head_norms(config, shard, place, parallel)
        if self.reads_others:
            self.k_norm = None
        self.value_norm: RMSNorm | None = None
        if config.value_norm and not self.reads_others:
            # It has no weight in checkpoints.
            self.value_norm = RMSNorm(size, config.rms_norm_eps, place.without_memory())
            self.value_norm.weight.fill_(1.0)
        self.rotary = None if layer.rope is None else rotaries[layer.rope]
        self.rope = layer.rope
        self.turned_norm = config.rms_norm_eps if config.turned_norm and layer.rope is not None else None
        """The epsilon of the norm of turned queries and keys; None: there is no such norm."""
        growth = config.query_growth
        grows = growth is not None and growth.of_turned == (layer.rope is not None)
        self.growth = len(rotaries) if grows else None
        """The place of the queries' factors behind the angles of all rotary embeddings; None: they have none."""
        self.sinks: WeightSlot | None = None
        if config.attention_sinks:
            sinks = place.vector(heads)
            self.sinks = WeightSlot(sinks, (config.num_heads,), 0, parallel.layout.tp_rank * heads)
        self.attention = Attention(
            heads, kv_heads, size, self._options(config, layer, rotaries[0].max_positions)
        )
        self.clip = config.clip_qkv
        self.is_gated = config.attention_gate
        self._gate = None
        if self.is_gated and not place.is_exact:
            self._gate = select_pair_gate(place.device, place.hidden_dtype, heads * size, "sigmoid")
        self._heads_shape = (-1, heads + 2 * kv_heads, size)
        self._rotated_and_value = (heads + kv_heads, kv_heads)
        self._query_and_key = (heads, kv_heads)
        self._out_size = heads * size

    def __call__(self, x: Tensor, angles: list[Tensor], kv_cache: Tensor, attn: AttentionMetadata) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the attention block's output [T, hidden]; `angles` are
        those of each rotary embedding, and behind them the factors of queries, if the model has any."""
        if self.reads_others:
            return self._read(x, angles, kv_cache, attn)
        projected = self.qkv_proj(x)
        if self.clip is not None:
            projected.clamp_(-self.clip, self.clip)
        gate: Tensor | None = None
        if self.is_gated:
            projected, gate = self._without_gate(projected)
        query_key, value = projected.view(self._heads_shape).split_with_sizes(self._rotated_and_value, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split_with_sizes(self._query_and_key, dim=1)
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        if self.rotary is not None and self.rope is not None:
            query_key = self.rotary.rotate(query_key, angles[self.rope])
        if self.turned_norm is not None:
            query_key = F.rms_norm(query_key, query_key.shape[-1:], eps=self.turned_norm)
        if self.value_norm is not None:
            value = self.value_norm(value)
        query, key = query_key.split_with_sizes(self._query_and_key, dim=1)
        if self.growth is not None:
            query = (query * angles[self.growth]).to(query.dtype)
        out = self.attention(query, key, value, kv_cache, attn).reshape(-1, self._out_size)
        return self.o_proj(out if gate is None else self._gated(out, gate))

    def _read(self, x: Tensor, angles: list[Tensor], kv_cache: Tensor, attn: AttentionMetadata) -> Tensor:
        """Do the same with the keys and values of another layer."""
        query = self.qkv_proj(x).view(-1, self._query_and_key[0], self._heads_shape[2])
        if self.q_norm is not None:
            query = self.q_norm(query)
        if self.rotary is not None and self.rope is not None:
            query = self.rotary.rotate(query, angles[self.rope])
        return self.o_proj(self.attention.read(query, kv_cache, attn).reshape(-1, self._out_size))

    def warm_up(self) -> None:
        """Compile what turns queries and keys."""
        if self.rotary is not None and self.rotary.size == self.attention.head_dim:
            self.rotary.warm_up(self._query_and_key[0] if self.reads_others else sum(self._query_and_key))

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self.qkv_proj.slots(prefix)
        yield from self.o_proj.slots(f"{prefix}.o_proj")
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                yield from norm.slots(f"{prefix}.{name}")
        if self.sinks is not None:
            yield f"{prefix}.sinks", self.sinks

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        return out * gate.sigmoid() if self._gate is None else self._gate(gate, out)

    def _without_gate(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, keys and values, and the gates [T, heads * head_dim], which lie beside each query."""
        heads, size = self._query_and_key[0], self._heads_shape[2]
        first, others = projected.split_with_sizes(
            (2 * self._out_size, projected.shape[1] - 2 * self._out_size), dim=1
        )
        query, gate = first.view(-1, heads, 2, size).unbind(2)
        return torch.cat((query.flatten(1), others), dim=1), gate.flatten(1)

    def _options(self, config: DecoderConfig, layer: LayerConfig, num_positions: int) -> AttentionOptions:
        # No request is longer than that, so that a rule which hides nothing costs nothing.
        rule = layer.attention if layer.size < num_positions else "full"
        return AttentionOptions(
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=layer.size if rule == "window" else None,
            chunk=layer.size if rule == "chunk" else None,
            soft_cap=config.attention_soft_cap,
            sinks=None if self.sinks is None else self.sinks.tensor,
        )


def _head_norms(
    config: DecoderConfig, shard: DecoderShard, place: Place, parallel: ParallelState
) -> tuple[RMSNorm | WholeHeadsNorm | None, RMSNorm | WholeHeadsNorm | None]:
    """Make the norms of queries and keys, if there are any."""
    size, eps = config.head_dim, config.rms_norm_eps
    if not config.qk_norm:
        return None, None
    if not config.qk_norm_whole:
        adds_one = config.norm_kind == "rms_one"
        return RMSNorm(size, eps, place, adds_one=adds_one), RMSNorm(size, eps, place, adds_one=adds_one)
    query = WholeHeadsNorm(
        shard.num_heads * size,
        config.num_heads * size,
        parallel.layout.tp_rank * shard.num_heads * size,
        eps,
        place=place,
        parallel=parallel,
    )
    key = WholeHeadsNorm(
        shard.num_kv_heads * size,
        config.num_kv_heads * size,
        shard.first_kv_head * size,
        eps,
        place=place,
        parallel=parallel,
    )
    return query, key
