"""Llama and what is built like it: Mistral, SmolLM and many others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.models.configs.decoder_config import DecoderConfig, QueryGrowth
from nbengine.models.configs.hf_config import number, original_length_of, stated_rope
from nbengine.models.families.text_part import TextPart
from nbengine.models.family import DecoderFamily, layers_alike, layers_of, window_of

_ORIGINAL = 16_384
_BETA = "llama_4_scaling_beta"


class Llama(DecoderFamily):
    """Llama 2 and 3, SmolLM 1 and 2, TinyLlama, Yi, and others of the class LlamaForCausalLM."""

    title = "Llama 2, 3; SmolLM 1, 2; TinyLlama; Yi"
    turns_parts = False

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
        }


class Mistral(TextPart):
    """Mistral, whose first version sees the last 4,096 tokens; the text of the models with images, too.

    The rotary embedding of those since Ministral 3 says that queries grow behind the original context.
    """

    title = "Mistral, Devstral; Mistral Small 3, Ministral 3 with images (text)"
    turns_parts = False
    defaults: Mapping[str, Any] = {"num_key_value_heads": 8}
    usual_window: int | None = 4096
    """The window of a configuration that says nothing of it; null says that there is none."""

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; the text of a model with images may be a Ministral 3."""
        text = hf.get("text_config")
        if isinstance(text, Mapping) and text.get("model_type") == "ministral3":
            return Ministral3().config({key: value for key, value in hf.items() if key != "text_config"})
        return super().config({"sliding_window": self.usual_window, **hf})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {"layers": layers_alike(hf, window_of(hf)), "query_growth": _growth(hf)}


class Ministral(Mistral):
    """Ministral 8B, some of whose layers have a window."""

    title = "Ministral 8B"

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {**super().variant(hf), "layers": layers_of(hf, window_of(hf))}


class Ministral3(Mistral):
    """Ministral 3 without its part for images."""

    title = "Ministral 3, Devstral 2"
    usual_window = None
    defaults: Mapping[str, Any] = {
        **Mistral.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
    }
    rope: Mapping[str, Any] = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": _ORIGINAL,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        _BETA: 0.1,
    }
    """The rotary embedding of a configuration that says nothing of it."""

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`."""
        if stated_rope(hf):
            return super().config(hf)
        base = number(hf, "rope_theta", self.rope["rope_theta"])
        return super().config({**hf, "rope_parameters": {**self.rope, "rope_theta": base}})


def _growth(hf: Mapping[str, Any]) -> QueryGrowth | None:
    """Return how queries grow, if what is stated of the rotary embedding says that they do."""
    rope = stated_rope(hf)
    if not rope.get(_BETA):
        return None
    step = original_length_of(hf, rope) or _ORIGINAL
    return QueryGrowth(step, number(rope, _BETA), ahead=0, of_turned=True)
