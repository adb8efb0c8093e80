"""Granite 3, dense and with experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.models.configs.hf_config import number, positive
from nbengine.models.configs.moe_config import MoEConfig, num_experts_of
from nbengine.models.family import DecoderFamily

_EXPERTS = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.experts.gate_up_proj": "mlp.experts.gate_up_proj",
    "block_sparse_moe.experts.down_proj": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "mlp.gate.weight",
    "block_sparse_moe.router.weight": "mlp.gate.weight",
}


class Granite(DecoderFamily):
    """Granite 3, dense: Llama whose embeddings, scores, blocks and logits are multiplied by numbers."""

    title = "Granite 3"
    turns_parts = False
    defaults: Mapping[str, Any] = {"max_position_embeddings": 2048}

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
            "embedding_scale": number(hf, "embedding_multiplier", 1.0),
            "residual_scale": number(hf, "residual_multiplier", 1.0),
            "attention_scale": number(hf, "attention_multiplier", 1.0),
            "logits_divisor": number(hf, "logits_scaling", 1.0),
        }


class GraniteMoe(Granite):
    """Granite 3 with experts."""

    title = "Granite 3 MoE"
    has_experts = True

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        moe = MoEConfig(
            num_experts=num_experts_of(hf, 8),
            experts_per_token=positive(hf, "num_experts_per_tok", 2),
            intermediate_size=positive(hf, "intermediate_size"),
            renormalize=True,
        )
        return {**super().variant(hf), "mlp_bias": False, "moe": moe}

    def our_name(self, name: str) -> str:
        """Files call a layer's experts block_sparse_moe."""
        *before, rest = name.split(".block_sparse_moe.", 1)
        found = _EXPERTS.get(f"block_sparse_moe.{rest}")
        return name if found is None else ".".join((*before, found))
