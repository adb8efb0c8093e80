"""Llama and what is built like it: Mistral, SmolLM and many others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.models.families.text_part import TextPart
from nbengine.models.family import DecoderFamily, layers_of, window_of


class Llama(DecoderFamily):
    """Llama 2 and 3, SmolLM 1 and 2, TinyLlama, Yi, and others of the class LlamaForCausalLM."""

    title = "Llama 2, 3; SmolLM 1, 2; TinyLlama; Yi"

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
        }


class Mistral(TextPart):
    """Mistral, whose first version sees the last 4,096 tokens; the text of the models with images, too."""

    title = "Mistral, Ministral; Mistral Small 3 (text)"
    defaults: Mapping[str, Any] = {"num_key_value_heads": 8}

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {"layers": layers_of(hf, window_of(hf))}
