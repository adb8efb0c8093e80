"""OLMo 1 to 3, and OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import DecoderConfig, LayerNorms
from nbengine.models.configs.hf_config import number, positive
from nbengine.models.configs.moe_config import MoEConfig
from nbengine.models.configs.rope_config import rope_of, ropes_of_types
from nbengine.models.family import DecoderFamily, layers_of

_BEHIND = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_THETA_3 = 5e5


class Olmo(DecoderFamily):
    """OLMo 1, whose norms have no weights."""

    title = "OLMo 1"
    turns_parts = False
    defaults: Mapping[str, Any] = {"max_position_embeddings": 2048}

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`; the class has one epsilon for all."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "norm_kind": "layer_plain",
            "rms_norm_eps": 1e-5,
            "clip_qkv": None if hf.get("clip_qkv") is None else number(hf, "clip_qkv"),
            "attention_bias": bias,
            "attention_out_bias": bias,
        }


class Olmoe(DecoderFamily):
    """OLMoE: experts, and norms of queries and keys over all heads."""

    title = "OLMoE"
    has_experts = True
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        if hf.get("clip_qkv") is not None:
            raise ModelLoadError(f"config.json: clip_qkv must be null for OLMoE, got {hf['clip_qkv']!r}")
        bias = bool(hf.get("attention_bias", False))
        moe = MoEConfig(
            num_experts=positive(hf, "num_experts"),
            experts_per_token=positive(hf, "num_experts_per_tok"),
            intermediate_size=positive(hf, "intermediate_size"),
            renormalize=bool(hf.get("norm_topk_prob", False)),
        )
        return {
            "qk_norm": True,
            "qk_norm_whole": True,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "moe": moe,
        }


class Olmo2(DecoderFamily):
    """OLMo 2: what comes out of a block is normalised, and queries and keys over all heads."""

    title = "OLMo 2"
    turns_parts = False
    defaults: Mapping[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "norms": _BEHIND,
            "qk_norm": True,
            "qk_norm_whole": True,
            "attention_bias": bias,
            "attention_out_bias": bias,
        }


class Olmo3(Olmo2):
    """OLMo 3: three of four layers have a window, and the others may have YaRN."""

    title = "OLMo 3"
    defaults: Mapping[str, Any] = {**Olmo2.defaults, "sliding_window": 4096, "rope_theta": _THETA_3}

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; the rotary embeddings of full and window layers may be stated apart."""
        full, local = ropes_of_types(hf)
        theta = {"rope_theta": number(hf, "rope_theta", _THETA_3)}
        full, other = {**theta, **full}, rope_of(hf, {**theta, **local}, _THETA_3)
        return super().config({**hf, "rope_parameters": full, "nbengine_local_rope": other})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        windows = {index: (index + 1) % 4 > 0 for index in range(positive(hf, "num_hidden_layers"))}
        layers = layers_of(hf, positive(hf, "sliding_window"), windows, rope=1)
        other = (hf["nbengine_local_rope"],) if layers else ()
        return {**super().variant(hf), "other_ropes": other, "layers": layers}
