"""A lean Llama-style decoder over a flattened batch of tokens, parametrised by `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import NBEngineError
from nbengine.kernels.dispatch import select_expert_kernels
from nbengine.models.attention import Attention
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.layers import RMSNorm, Slots, WeightSlot
from nbengine.models.mlp import DecoderMLP
from nbengine.models.moe import SparseMoeBlock
from nbengine.models.parallel_layers import (
    ParallelLMHead,
    QKVParallelLinear,
    VocabParallelEmbedding,
    row_parallel_linear,
)
from nbengine.models.rotary import RotaryEmbedding
from nbengine.models.sharding import DecoderShard

if TYPE_CHECKING:
    from nbengine.worker.attention_metadata import AttentionMetadata

_EMBEDDING = "model.embed_tokens"
_LM_HEAD = "lm_head"


class DecoderAttention:
    """Projections, RoPE and attention of one layer, for the heads of this rank."""

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        dtype: torch.dtype,
        device: torch.device,
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
            dtype=dtype,
            device=device,
        )
        self.o_proj = row_parallel_linear(
            config.num_heads * size,
            config.hidden_size,
            parallel=parallel,
            bias=config.attention_out_bias,
            dtype=dtype,
            device=device,
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


class DecoderLayer:
    """Attention and feed-forward block, each normalised first and added to the residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        rotary: RotaryEmbedding,
        mlp: DecoderMLP | SparseMoeBlock,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.self_attn = DecoderAttention(config, rotary, dtype, device, parallel)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype, device=device)
        self.mlp = mlp

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
    """One rank's part of embedding, layers, final norm and output projection. To be run under
    `torch.inference_mode`.

    The first pipeline stage has the embedding, the last one the norm and the projection, and each its own layers;
    the stages' hidden states are brought from one to the next by whoever runs them. Among the ranks of a stage,
    which run `forward` together, every layer is divided, and their hidden states are the same.

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
        parallel: ParallelState = SINGLE,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.layout = parallel.layout
        self.shard = DecoderShard.of(config, parallel.layout)
        positions = min(max_positions or config.max_position_embeddings, config.max_position_embeddings)
        self.rotary = RotaryEmbedding(config, max_positions=positions, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, self.rotary, mlp, dtype, device, parallel) for mlp in self._mlps(parallel)
        ]
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.norm: RMSNorm | None = None
        self.lm_head: ParallelLMHead | None = None
        if parallel.layout.is_first_stage:
            self.embed_tokens = self._vocabulary_rows(parallel)
        if parallel.layout.is_last_stage:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
            if not config.num_labels:
                tied = self.embed_tokens if config.tie_word_embeddings else None
                self.lm_head = ParallelLMHead(tied or self._vocabulary_rows(parallel), parallel)

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, hidden] of input_ids [T], in memory of their own.

        Raises:
            NBEngineError: this is not the first stage.
        """
        if self.embed_tokens is None:
            raise NBEngineError(f"{self.layout}: tokens are embedded on the first pipeline stage only")
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[Tensor],
        attn: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, hidden] of input_ids [T] at positions [T], both int64: on the last stage those after
        the final norm, before it the residual stream, which the next stage takes as `inputs_embeds`.

        `kv_caches` has one tensor for each of `layers`, [2, num_blocks, num_kv_heads, block_size, head_dim] with
        `shard.num_kv_heads`, which gets the new keys and values at `attn.slot_mapping`. `inputs_embeds`
        [T, hidden], which is overwritten, takes the place of `input_ids`.
        """
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        cos, sin = self.rotary.at(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, cos, sin, kv_cache, attn)
        return x if self.norm is None else self.norm(x)

    __call__ = forward

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab_size] of the hidden states [N, hidden] that `forward` gave; the same on all ranks.

        Raises:
            NBEngineError: there is no output projection: this is not the last stage, or the model classifies.
        """
        if self.lm_head is None:
            raise NBEngineError(f"{self.layout}: the model has no output projection here")
        return self.lm_head(hidden)

    def dummy_forward(self) -> None:
        """Take part in the experts' computation for other engine cores' tokens with none of one's own; their workers
        of this stage run `forward` or this. Nothing is exchanged between stages."""
        nothing = torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
        for block in self.moe_blocks:
            block(nothing)

    def warm_up(self) -> None:
        """Compile what the experts need, so that no step waits for it."""
        for block in self.moe_blocks[:1]:
            block.warm_up()

    @property
    def moe_blocks(self) -> list[SparseMoeBlock]:
        """The blocks of this stage's layers that have experts."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, SparseMoeBlock)]

    def weight_slots(self) -> dict[str, WeightSlot]:
        """What to load, under the names of Hugging Face checkpoints; tied weights appear once."""
        slots: dict[str, WeightSlot] = {}
        if self.embed_tokens is not None:
            slots.update(self.embed_tokens.slots(_EMBEDDING))
        for index, layer in zip(self.shard.layers, self.layers, strict=True):
            slots.update(layer.slots(f"model.layers.{index}"))
        if self.norm is not None:
            slots.update(self.norm.slots("model.norm"))
        if self.lm_head is not None:
            slots.update(self.lm_head.rows.slots(_EMBEDDING if self.config.tie_word_embeddings else _LM_HEAD))
        return slots

    @property
    def ignored_weights(self) -> frozenset[str]:
        """Tensors that a checkpoint may have and that nothing here uses."""
        has_own = not (self.config.tie_word_embeddings or self.config.num_labels)
        return frozenset() if has_own else frozenset((f"{_LM_HEAD}.weight",))

    def parameters(self) -> Iterator[Tensor]:
        """Every weight once; parts of a fused weight are views of one storage."""
        return (slot.tensor for slot in self.weight_slots().values())

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights in bytes."""
        return sum(weight.nbytes for weight in self.parameters())

    def _mlps(self, parallel: ParallelState) -> Iterator[DecoderMLP | SparseMoeBlock]:
        config, dtype, device = self.config, self.dtype, self.device
        kernels = None if config.moe is None else select_expert_kernels(device, dtype)
        for layer in self.shard.layers:
            if config.moe is not None and kernels is not None and config.moe.has_experts(layer):
                yield SparseMoeBlock(
                    config.moe, config.hidden_size, kernels, dtype=dtype, device=device, parallel=parallel
                )
            else:
                yield DecoderMLP(
                    config.hidden_size,
                    config.intermediate_size,
                    bias=config.mlp_bias,
                    dtype=dtype,
                    device=device,
                    parallel=parallel,
                )

    def _vocabulary_rows(self, parallel: ParallelState) -> VocabParallelEmbedding:
        sizes = (self.config.vocab_size, self.config.hidden_size)
        return VocabParallelEmbedding(*sizes, parallel=parallel, dtype=self.dtype, device=self.device)
