"""Gemma 1 to 3, text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.configs.decoder_config import DecoderConfig, LayerNorms
from nbengine.models.configs.hf_config import number, positive
from nbengine.models.configs.rope_config import Rope, rope_of, ropes_of_types
from nbengine.models.families.text_part import TextPart
from nbengine.models.family import DecoderFamily, layers_of, window_of

_BOTH = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_GELU = "gelu_pytorch_tanh"
_LOCAL_THETA, _GLOBAL_THETA = 1e4, 1e6


class Gemma(DecoderFamily):
    """Gemma 1."""

    title = "Gemma 1"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        if hf.get("use_bidirectional_attention"):
            raise ModelLoadError(
                "config.json: use_bidirectional_attention is not supported: decoders are causal"
            )
        bias = bool(hf.get("attention_bias", False))
        return {
            "norm_kind": "rms_one",
            "embedding_scale": math.sqrt(positive(hf, "hidden_size")),
            "hidden_act": self.activation(hf),
            "attention_bias": bias,
            "attention_out_bias": bias,
        }

    def activation(self, hf: Mapping[str, Any]) -> str:
        """Return the activation that a configuration states; old files state gelu and mean its approximation."""
        stated = str(hf.get("hidden_act", _GELU))
        return _GELU if stated == "gelu" else stated


class Gemma2(Gemma):
    """Gemma 2: every other layer has a window, scores and logits are capped."""

    title = "Gemma 2"
    defaults: Mapping[str, Any] = {
        **Gemma.defaults,
        "num_key_value_heads": 4,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }

    def activation(self, hf: Mapping[str, Any]) -> str:
        """See `Gemma.activation`."""
        return _activation(hf)

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        windows = {index: index % 2 == 0 for index in range(positive(hf, "num_hidden_layers"))}
        return {
            **super().variant(hf),
            **_scores(hf),
            "norms": _BOTH,
            "layers": layers_of(hf, window_of(hf), windows),
        }


class Gemma3(TextPart, Gemma):
    """Gemma 3: five of six layers have a window and a rotary embedding of their own; the text of the models with
    images, too."""

    title = "Gemma 3 (text)"
    defaults: Mapping[str, Any] = {
        **Gemma.defaults,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }

    def activation(self, hf: Mapping[str, Any]) -> str:
        """See `Gemma.activation`."""
        return _activation(hf)

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; the rotary embeddings of full and window layers are stated apart."""
        full, local = ropes_of_types(hf)
        full = {"rope_theta": number(hf, "rope_theta", _GLOBAL_THETA), **full}
        local = {"rope_theta": number(hf, "rope_local_base_freq", _LOCAL_THETA), **local}
        other: Rope = rope_of(hf, local, _LOCAL_THETA)
        return super().config({**hf, "rope_parameters": full, "nbengine_local_rope": other})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        pattern = positive(hf, "sliding_window_pattern", 6)
        windows = {index: (index + 1) % pattern > 0 for index in range(positive(hf, "num_hidden_layers"))}
        # A window of all tokens has its own rotary embedding nevertheless.
        layers = layers_of(hf, positive(hf, "sliding_window"), windows, rope=1)
        return {
            **super().variant(hf),
            **_scores(hf),
            # The class has none, whatever the file says.
            "attention_soft_cap": None,
            "norms": _BOTH,
            "qk_norm": True,
            "other_ropes": (hf["nbengine_local_rope"],) if layers else (),
            "layers": layers,
        }


def _activation(hf: Mapping[str, Any]) -> str:
    return str(hf.get("hidden_activation") or _GELU)


def _scores(hf: Mapping[str, Any]) -> dict[str, Any]:
    attention, logits = hf.get("attn_logit_softcapping"), hf.get("final_logit_softcapping")
    return {
        "attention_scale": number(hf, "query_pre_attn_scalar") ** -0.5,
        "attention_soft_cap": None if attention is None else number(hf, "attn_logit_softcapping"),
        "logits_soft_cap": None if logits is None else number(hf, "final_logit_softcapping"),
    }
