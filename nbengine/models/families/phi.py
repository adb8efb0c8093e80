"""Phi-3, Phi-3.5 and Phi-4."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nbengine.models.checkpoints.tensor_names import TensorPart, stacked_parts
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.hf_config import stated_rope
from nbengine.models.family import DecoderFamily, layers_alike, window_of


class Phi3(DecoderFamily):
    """Phi-3, Phi-4 and Phi-4-mini: Llama with fused projections, LongRoPE and, in Phi-4-mini, a partial rotary
    embedding."""

    title = "Phi-3, 3.5, 4, 4-mini"
    defaults: Mapping[str, Any] = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; old files call LongRoPE "su" or "yarn"."""
        stated = dict(stated_rope(hf))
        for key in ("rope_type", "type"):
            if stated.get(key) in ("su", "yarn"):
                stated[key] = "longrope"
        original = hf.get("original_max_position_embeddings") or 4096
        return super().config({**hf, "original_max_position_embeddings": original, "rope_parameters": stated})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {"layers": layers_alike(hf, window_of(hf))}

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`."""
        return fused_parts(config, name, shape) or super().tensor_parts(config, name, shape)


def fused_parts(
    config: DecoderConfig, name: str, shape: tuple[int, ...]
) -> Iterator[tuple[str, TensorPart]] | None:
    """Return the projections of a file's `self_attn.qkv_proj` or `mlp.gate_up_proj`; None: it is neither."""
    block = ".".join(name.split(".")[-3:-1])
    if block == "self_attn.qkv_proj":
        rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return stacked_parts(name, shape, (("q_proj", rows), ("k_proj", kv_rows), ("v_proj", kv_rows)))
    if block == "mlp.gate_up_proj":
        inner = config.intermediate_size
        return stacked_parts(name, shape, (("gate_proj", inner), ("up_proj", inner)))
    return None
