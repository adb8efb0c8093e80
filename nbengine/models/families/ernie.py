"""ERNIE 4.5 without experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.models.family import DecoderFamily


class Ernie45(DecoderFamily):
    """ERNIE 4.5 0.3B: neighbouring dimensions turn together."""

    title = "ERNIE 4.5 (0.3B)"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("use_bias", False))
        return {
            "rotary_interleaved": True,
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bias,
        }
