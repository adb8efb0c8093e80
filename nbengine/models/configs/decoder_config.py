"""The parameters of the native decoder, and the way to them from Hugging Face configurations; free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from nbengine.errors import ModelLoadError
from nbengine.kv_cache.specs import LayerRule
from nbengine.models.configs.latent_config import LatentConfig
from nbengine.models.configs.moe_config import MoEConfig
from nbengine.models.configs.quantization_config import Quantization
from nbengine.models.configs.recurrent_config import Mamba2Config, ShortConvConfig, check_kernel
from nbengine.models.configs.rope_config import Rope, RopeScaling

_MAX_LAYERS = 4096
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""The activation that each name in config.json means."""
UNGATED = ("relu2",)
"""The activations of blocks without a gate: what they make is not multiplied with another projection."""

NormKind = Literal["rms", "rms_one", "layer", "layer_plain"]
"""The root mean square with a weight; with the weight plus one (Gemma); LayerNorm with weight and bias; and without
either (OLMo 1)."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The entries that each layer has of its own.

    `attention` says which keys a query sees: all before it ("full"), those of the last `size` tokens ("window"), or
    those of its own `size` tokens ("chunk"); a layer that is "recurrent" has a block with a state in place of
    attention, which takes `size` bytes of a request.
    `rope` is the number of its rotary embedding; None: it has none. `head_dim`, `kv_heads` and `inner` are its own in
    place of the model's `head_dim`, `num_kv_heads` and `intermediate_size`, unless they are 0. A layer with a `source`
    makes no keys and values, and reads those of the layer with that number. `values_of_keys`: the projection to keys is
    that to values, too. Without `has_mlp` it has no feed-forward block.
    """

    attention: Literal["full", "window", "chunk", "recurrent"] = "full"
    size: int = 0
    rope: int | None = 0
    head_dim: int = 0
    kv_heads: int = 0
    inner: int = 0
    source: int | None = None
    values_of_keys: bool = False
    has_mlp: bool = True


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """The names of a layer's norms in checkpoints: those of what goes into the attention and the feed-forward
    block, and those of what comes out of them; None: it is not normalised."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


PRE_NORMS = LayerNorms()


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """The factor of queries in layers without rotary embedding, or `of_turned`, in those with one: at position p it is
    1 + `rate` * log(1 + floor((p + `ahead`) / `step`)) (Nakanishi, 2025)."""

    step: int
    rate: float
    ahead: int = 1
    of_turned: bool = False


@dataclass(frozen=True, slots=True)
class DeltaRuleConfig:
    """The sizes of the layers that have a gated delta rule, and the tokens that their short convolution sees.

    Each key head serves `value_heads / key_heads` neighbouring value heads. `by_head`: the checkpoint has the
    projections of a key head, and of its value heads, one after the other (Qwen3-Next). `tiled`: the output
    projection takes the first value heads of all key heads, then their second ones, and so on (llama.cpp).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    by_head: bool = False
    tiled: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelLoadError(
                f"linear_num_value_heads ({self.value_heads}) must be a multiple of linear_num_key_heads "
                f"({self.key_heads})"
            )
        check_kernel("linear_conv_kernel_dim", self.kernel)

    @property
    def group(self) -> int:
        """Return the number of value heads that a key head serves."""
        return self.value_heads // self.key_heads

    @property
    def channels(self) -> int:
        """Return the channels of the convolution: all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_bytes(self) -> int:
        """Return the most bytes that a layer keeps of a request, on all tensor-parallel ranks together."""
        return 4 * (self.channels * (self.kernel - 1) + self.value_heads * self.key_dim * self.value_dim)


@dataclass(frozen=True)
class DecoderConfig:
    """The shape and variants of a decoder.

    `attention_bias` is for the q, k and v projections, `attention_out_bias` for the output projection;
    `qk_norm` normalises queries and keys before RoPE, per head (Qwen3) or, with `qk_norm_whole`, over all heads
    (OLMo 2); `turned_norm` normalises them per head after RoPE, without a weight, in the layers that have it
    (Llama 4). `num_labels` is 0 unless the model has a classification head in place of its output projection. `moe`
    has the experts that some layers, or all, have in place of one feed-forward block, or beside it; `intermediate_size` is
    that of dense blocks; if it is 0, there are none. `quantization` says how safetensors files have the matrices, or how they are to be rounded.

    `layers` has what each layer has of its own, and is empty if all see all keys and turn by the first rotary
    embedding. That is `rope_theta` and `rope_scaling`; `other_ropes` are those with the numbers from 1 on. They turn
    the first `rotary_dim` dimensions of a head, all if it is 0; neighbouring ones are pairs if `rotary_interleaved`.

    Scores are multiplied by `attention_scale` (None: one over the root of head_dim), embeddings by
    `embedding_scale`, what a block adds to the residual stream by `residual_scale`; logits are divided by
    `logits_divisor`. A soft cap c turns x into c * tanh(x / c). With `attention_sinks` each head has one more score,
    whose weight goes nowhere. Projections to queries, keys and values are cut to at most `clip_qkv`. With
    `attention_gate` each head has a gate beside its query, whose sigmoid its output is multiplied by. `delta_rule`,
    `mamba2` or `short_conv` has the sizes of recurrent layers. With `latent` attention reads latents: a layer keeps one
    row of `head_dim` numbers a token, as if there were one key head, and no values beside it. `query_growth` is
    for layers with or without rotary embedding.

    With `value_norm` values are normalised per head, without a weight. `layer_inputs` is how many numbers each layer takes
    of an embedding that it has for each of `layer_input_tokens` tokens, and `layer_scales` says that each multiplies the
    residual stream in the end (Gemma 4).

    Feed-forward blocks are `gated`: an activation of one projection multiplies another one. With `single_blocks` each
    layer of a file is one block of the model's layers (Nemotron-H, whose feed-forward blocks have no gate).

    `family` names the class that builds the model (`nbengine.models.registry.load_family`).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    num_labels: int = 0
    moe: MoEConfig | None = None
    quantization: Quantization | None = None
    qk_norm_whole: bool = False
    turned_norm: bool = False
    norms: LayerNorms = PRE_NORMS
    norm_kind: NormKind = "rms"
    layers: tuple[LayerConfig, ...] = ()
    other_ropes: tuple[Rope, ...] = ()
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    clip_qkv: float | None = None
    logits_soft_cap: float | None = None
    logits_divisor: float = 1.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_gate: bool = False
    delta_rule: DeltaRuleConfig | None = None
    mamba2: Mamba2Config | None = None
    short_conv: ShortConvConfig | None = None
    latent: LatentConfig | None = None
    query_growth: QueryGrowth | None = None
    value_norm: bool = False
    layer_inputs: int = 0
    layer_input_tokens: int = 0
    layer_scales: bool = False
    gated: bool = True
    single_blocks: bool = False
    family: str = "nbengine.models.family:DecoderFamily"

    def __post_init__(self) -> None:
        if self.num_layers > _MAX_LAYERS:
            raise ModelLoadError(f"num_hidden_layers is {self.num_layers}, more than {_MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim must be even, got {self.head_dim}")
        known = [name for name, means in ACTIVATIONS.items() if (means not in UNGATED) is self.gated]
        if self.hidden_act not in known:
            raise ModelLoadError(
                f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(known)}"
            )
        if self.layers and len(self.layers) != self.num_layers:
            raise ModelLoadError(
                f"config.json describes {len(self.layers)} layers, num_hidden_layers is {self.num_layers}"
            )

    def layer(self, index: int) -> LayerConfig:
        """Return what the layer with this number has of its own."""
        return self.layers[index] if self.layers else LayerConfig()

    def of_layer(self, index: int) -> DecoderConfig:
        """Return the parameters of a model whose layers have all the sizes of this one."""
        own = self.layer(index)
        if not (own.head_dim or own.kv_heads or own.inner):
            return self
        return replace(
            self,
            head_dim=own.head_dim or self.head_dim,
            num_kv_heads=own.kv_heads or self.num_kv_heads,
            intermediate_size=own.inner or self.intermediate_size,
        )

    def cache_rules(self) -> tuple[LayerRule, ...]:
        """Return what each layer of the model keeps of a request."""
        layers = map(self.layer, range(self.num_layers))
        return tuple(
            LayerRule(layer.attention, layer.size)
            if layer.source is None
            else LayerRule("shared", layer.source + 1)
            for layer in layers
        )

    @property
    def file_layers(self) -> int:
        """Return the number of layers that a file has of the model."""
        return self.num_layers + (sum(layer.has_mlp for layer in self.layers) if self.single_blocks else 0)

    @property
    def cache_parts(self) -> int:
        """Return how many rows an attention layer keeps of a token and KV head: key and value, or a latent."""
        return 2 if self.latent is None else 1

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Return the rotary embeddings, by their numbers."""
        return Rope(self.rope_theta, self.rope_scaling), *self.other_ropes

    @property
    def usual_positions(self) -> int:
        """The longest sequence unless somebody asks for another: dynamic scaling begins beyond it."""
        dynamic = [
            rope.scaling.original_max_position_embeddings
            for rope in self.ropes
            if rope.scaling is not None and rope.scaling.kind == "dynamic"
        ]
        return min([self.max_position_embeddings, *dynamic])
