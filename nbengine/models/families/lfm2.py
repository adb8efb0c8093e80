"""LFM2: layers with a gated short convolution between layers with attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart, stacked_parts
from nbengine.models.configs.decoder_config import DecoderConfig, LayerNorms
from nbengine.models.configs.hf_config import natural, number, positive
from nbengine.models.configs.moe_config import GroupedRouting, MoEConfig
from nbengine.models.configs.recurrent_config import ShortConvConfig
from nbengine.models.families.recurrent_layers import layers_with_state, switch
from nbengine.models.family import DecoderFamily

_CONV, _ATTENTION = "conv", "full_attention"
_NAMES = {
    "self_attn.out_proj.": "self_attn.o_proj.",
    "self_attn.q_layernorm.": "self_attn.q_norm.",
    "self_attn.k_layernorm.": "self_attn.k_norm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
    "conv.": "linear_attn.",
}
"""The beginnings of names within a layer, and ours."""
_EXPERT_NAMES = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


class Lfm2(DecoderFamily):
    """LFM2, dense."""

    title = "LFM2"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
    }

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; files before transformers 5 have two names of their own, of which that of tied
        embeddings counts where the usual one is missing, so that it can be overridden."""
        inner, tied = hf.get("block_ff_dim"), hf.get("tie_word_embeddings")
        tied = hf.get("tie_embedding") if tied is None else tied
        stated = {
            **hf,
            "rms_norm_eps": number(hf, "norm_eps", 1e-5),
            **({} if tied is None else {"tie_word_embeddings": tied}),
            **({} if inner is None else {"intermediate_size": inner}),
        }
        return super().config(stated)

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        convolution = ShortConvConfig(
            channels=positive(hf, "hidden_size"),
            kernel=positive(hf, "conv_L_cache", 3),
            bias=switch(hf, "conv_bias", default=False),
        )
        size = convolution.state_bytes
        return {
            "intermediate_size": _inner(hf),
            "hidden_act": "silu",
            "qk_norm": True,
            "norms": LayerNorms("operator_norm", None, "ffn_norm", None),
            "layers": layers_with_state(_types(hf), [_CONV], [_ATTENTION], state_bytes=size),
            "short_conv": convolution,
        }

    def our_name(self, name: str) -> str:
        """Files have other names for most blocks."""
        before, _, rest = name.partition(".layers.")
        index, _, inside = rest.partition(".")
        for theirs, ours in _NAMES.items():
            if inside.startswith(theirs):
                return f"{before}.layers.{index}.{ours}{inside.removeprefix(theirs)}"
        return name.replace("model.embedding_norm.", "model.norm.", 1)

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        if ".conv.in_proj." not in name:
            yield from super().tensor_parts(config, name, shape)
            return
        parts = [(f"in_proj_{part}", config.hidden_size) for part in ("b", "c", "x")]
        for stated, part in stacked_parts(name, shape, parts):
            yield self.our_name(stated), part


class Lfm2Moe(Lfm2):
    """LFM2 with experts in all layers but the first ones."""

    title = "LFM2 MoE"
    has_experts = True

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        routing = GroupedRouting(
            "sigmoid",
            has_correction=switch(hf, "use_expert_bias", default=True),
            scale=number(hf, "routed_scaling_factor", 1.0),
        )
        moe = MoEConfig(
            num_experts=positive(hf, "num_experts", 32),
            experts_per_token=positive(hf, "num_experts_per_tok", 4),
            intermediate_size=positive(hf, "moe_intermediate_size", 1792),
            renormalize=switch(hf, "norm_topk_prob", default=True),
            dense_layers=tuple(range(natural(hf, "num_dense_layers", 2))),
            routing=routing,
        )
        return {**super().variant(hf), "intermediate_size": positive(hf, "intermediate_size"), "moe": moe}

    def our_name(self, name: str) -> str:
        """Files name the projections of experts like those of dense blocks."""
        # GGUF has the correction as a bias.
        name = name.replace(".e_score_correction.bias", ".e_score_correction_bias")
        before, _, inside = name.partition(".feed_forward.")
        if inside.startswith(("gate.", "experts.", "expert_bias")):
            for theirs, ours in _EXPERT_NAMES.items():
                inside = inside.replace(theirs, ours, 1)
            return f"{before}.mlp.{inside.replace('expert_bias', 'gate.e_score_correction_bias', 1)}"
        return super().our_name(name)


def _inner(hf: Mapping[str, Any]) -> int:
    """Return the inner features of feed-forward blocks, which the configuration states before an adjustment."""
    inner = positive(hf, "intermediate_size")
    if not switch(hf, "block_auto_adjust_ff_dim", default=True):
        return inner
    inner = int(2 * inner / 3)
    if hf.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    unit = positive(hf, "block_multiple_of", 256)
    return -(-int(number(hf, "block_ffn_dim_multiplier", 1.0) * inner) // unit) * unit


def _types(hf: Mapping[str, Any]) -> Any:
    types, indices = hf.get("layer_types"), hf.get("full_attn_idxs")
    if types is not None:
        return types
    count = positive(hf, "num_hidden_layers")
    if indices is None:
        return [_ATTENTION] * count
    if not isinstance(indices, list) or not set(indices) <= set(range(count)):
        raise ModelLoadError(
            f"config.json: full_attn_idxs must be a list of numbers from 0 to {count - 1}, got {quoted(indices)}"
        )
    return [_ATTENTION if index in indices else _CONV for index in range(count)]
