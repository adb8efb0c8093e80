"""Seed-OSS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.models.family import DecoderFamily


class SeedOss(DecoderFamily):
    """Seed-OSS: Llama with biases of queries, keys and values."""

    title = "Seed-OSS"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {
            "attention_bias": bool(hf["attention_bias"]),
            "attention_out_bias": bool(hf.get("attention_out_bias", False)),
            "mlp_bias": bool(hf.get("mlp_bias", False)),
        }
