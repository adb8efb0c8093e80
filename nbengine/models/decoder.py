"""A lean Llama-style decoder over a flattened batch of tokens, parametrised by `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.models.attention import Attention
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.layers import Linear, MergedLinear, RMSNorm, Slots
from nbengine.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from nbengine.worker.attention_metadata import AttentionMetadata


class DecoderAttention:
    """Projections, RoPE and attention of one layer."""

    def __init__(
        self, config: DecoderConfig, rotary: RotaryEmbedding, dtype: torch.dtype, device: torch.device
    ):
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        parts = [("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size)]
        self.qkv_proj = MergedLinear(
            config.hidden_size, parts, bias=config.attention_bias, dtype=dtype, device=device
        )
        self.o_proj = Linear(
            heads * size, config.hidden_size, bias=config.attention_out_bias, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
        self.attention = Attention(heads, kv_heads, size, size**-0.5)
        self._rotary = rotary
        self._heads_shape = (-1, heads + 2 * kv_heads, size)
        self._rotated_and_value = (heads + kv_heads, kv_heads)
        self._query_and_key = (heads, kv_heads)
        self._out_size = heads * size

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, attn: AttentionMetadata
    ) -> Tensor:
        """Normalised hidden states x [T, hidden] to the attention block's output [T, hidden]."""
        heads = self.qkv_proj(x).view(self._heads_shape)
        query_key, value = heads.split_with_sizes(self._rotated_and_value, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = query_key.split_with_sizes(self._query_and_key, dim=1)
            query_key = torch.cat((self.q_norm(query), self.k_norm(key)), dim=1)
        rotated = self._rotary.rotate(query_key, cos, sin)
        query, key = rotated.split_with_sizes(self._query_and_key, dim=1)
        out = self.attention(query, key, value, kv_cache, attn)
        return self.o_proj(out.reshape(-1, self._out_size))

    def slots(self, prefix: str) -> Slots:
        """The weights under the checkpoint's names."""
        yield from self.qkv_proj.slots(prefix)
        yield from self.o_proj.slots(f"{prefix}.o_proj")
        if self.q_norm is not None and self.k_norm is not None:
            yield from self.q_norm.slots(f"{prefix}.q_norm")
            yield from self.k_norm.slots(f"{prefix}.k_norm")


class DecoderMLP:
    """The gated feed-forward block: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up_proj = MergedLinear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised hidden states x [T, hidden] to the block's output [T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))

    def slots(self, prefix: str) -> Slots:
        """The weights under the checkpoint's names."""
        yield from self.gate_up_proj.slots(prefix)
        yield from self.down_proj.slots(f"{prefix}.down_proj")


class DecoderLayer:
    """Attention and feed-forward block, each normalised first and added to the residual stream."""

    def __init__(
        self, config: DecoderConfig, rotary: RotaryEmbedding, dtype: torch.dtype, device: torch.device
    ):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = DecoderAttention(config, rotary, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = DecoderMLP(config, dtype, device)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, kv_cache: Tensor, attn: AttentionMetadata
    ) -> Tensor:
        """The residual stream x [T, hidden], updated in place and given back."""
        x.add_(self.self_attn(self.input_layernorm(x), cos, sin, kv_cache, attn))
        return x.add_(self.mlp(self.post_attention_layernorm(x)))

    def slots(self, prefix: str) -> Slots:
        """The weights under the checkpoint's names."""
        yield from self.input_layernorm.slots(f"{prefix}.input_layernorm")
        yield from self.self_attn.slots(f"{prefix}.self_attn")
        yield from self.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm")
        yield from self.mlp.slots(f"{prefix}.mlp")


class DecoderForCausalLM:
    """Embedding, layers, final norm and output projection. To be run under `torch.inference_mode`.

    Weights are uninitialised until a loader has filled `weight_slots()`. On the device "meta" they take no
    memory, which is how a loader learns the shapes before it allocates anything.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
        self.rotary = RotaryEmbedding(config, max_positions=positions, dtype=dtype, device=device)
        self.embed_tokens = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, self.rotary, dtype, device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = (
            self.embed_tokens if config.tie_word_embeddings else torch.empty_like(self.embed_tokens)
        )

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, hidden] of input_ids [T], in memory of their own."""
        return F.embedding(input_ids, self.embed_tokens)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [T, hidden], of input_ids [T] at positions [T], both int64.

        `kv_caches` has one tensor a layer, [2, num_blocks, num_kv_heads, block_size, head_dim], which gets the
        new keys and values at `attn.slot_mapping`. `inputs_embeds` [T, hidden], which is overwritten, takes the
        place of `input_ids`.
        """
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cos, sin = self.rotary.at(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, cos, sin, kv_cache, attn)
        return self.norm(x)

    __call__ = forward

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab_size] of the hidden states [N, hidden] that `forward` gave."""
        return F.linear(hidden, self.lm_head)

    def weight_slots(self) -> dict[str, Tensor]:
        """The tensors to load, under the names of Hugging Face checkpoints; tied weights appear once."""
        slots = {"model.embed_tokens.weight": self.embed_tokens}
        for index, layer in enumerate(self.layers):
            slots.update(layer.slots(f"model.layers.{index}"))
        slots.update(self.norm.slots("model.norm"))
        if self.lm_head is not self.embed_tokens:
            slots["lm_head.weight"] = self.lm_head
        return slots

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Tensors that a checkpoint may have and that nothing here uses."""
        return frozenset(("lm_head.weight",)) if self.lm_head is self.embed_tokens else frozenset()

    def parameters(self) -> Iterator[Tensor]:
        """Every weight once; parts of a fused weight are views of one storage."""
        yield from self.weight_slots().values()

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights in bytes."""
        return sum(weight.nbytes for weight in self.parameters())
