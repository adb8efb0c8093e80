"""GLM-4, in its first form (glm) and that of 0414 (glm4); GLM-4.5 to 4.7, which have experts (glm4_moe)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import DecoderConfig, LayerNorms
from nbengine.models.families.deepseek import DeepseekV3
from nbengine.models.families.phi import fused_parts
from nbengine.models.family import DecoderFamily

_BOTH = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


class Glm(DecoderFamily):
    """GLM-4-9B and GLM-Edge: half of each head turns, neighbouring dimensions together."""

    title = "GLM-4 (9B), GLM-Edge"
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {"attention_bias": bool(hf["attention_bias"]), "rotary_interleaved": True}

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        return fused_parts(config, name, shape) or super().tensor_parts(config, name, shape)


class Glm4(Glm):
    """GLM-4-0414 and GLM-Z1, which normalise what comes out of a block, too."""

    title = "GLM-4-0414, GLM-Z1"

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {**super().variant(hf), "norms": _BOTH}


class Glm4Moe(DeepseekV3):
    """GLM-4.5 to 4.7: DeepSeek-V3's experts, and attention with heads of keys and values."""

    title = "GLM-4.5, 4.5 Air, 4.6, 4.7"
    defaults: Mapping[str, Any] = {
        **DeepseekV3.defaults,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {
            "attention_bias": bool(hf.get("attention_bias", False)),
            "qk_norm": bool(hf.get("use_qk_norm", False)),
            "moe": self.experts(hf),
        }
