"""EXAONE 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.configs.decoder_config import DecoderConfig, LayerConfig, LayerNorms
from nbengine.models.configs.hf_config import positive
from nbengine.models.family import DecoderFamily, layers_of, window_of

_BEHIND = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_PATTERN = 4


class Exaone4(DecoderFamily):
    """EXAONE 4: what comes out of a block is normalised; in the models with windows, layers that see everything have no
    rotary embedding."""

    title = "EXAONE 4"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
    }

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; null says that no layer has a window."""
        return super().config({"sliding_window": 4096, **hf})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {"norms": _BEHIND, "qk_norm": True, "layers": _layers(hf)}


def _layers(hf: Mapping[str, Any]) -> tuple[LayerConfig, ...]:
    if hf.get("sliding_window") is None:
        return ()
    count, pattern = (
        positive(hf, "num_hidden_layers"),
        _pattern_of(hf.get("sliding_window_pattern", _PATTERN)),
    )
    has_window = {index: (index + 1) % pattern > 0 for index in range(count)}
    # A window that hides nothing still says which layers turn.
    size = positive(hf, "sliding_window")
    stated = layers_of(hf, size, has_window) or (LayerConfig(),) * count
    seen = LayerConfig() if window_of(hf) is None else LayerConfig("window", size)
    return tuple(seen if layer.attention == "window" else LayerConfig(rope=None) for layer in stated)


def _pattern_of(stated: object) -> int:
    """Return the distance of layers that see everything, which files write as a number or as "LLLG"."""
    if isinstance(stated, str) and stated.endswith("G") and set(stated[:-1]) == {"L"}:
        return len(stated)
    if isinstance(stated, int) and stated > 0:
        return stated
    raise ModelLoadError(
        f"config.json: sliding_window_pattern must be a positive integer or like 'LLLG', got {quoted(stated)}"
    )
