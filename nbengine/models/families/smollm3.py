"""SmolLM 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.configs.decoder_config import LayerConfig
from nbengine.models.configs.hf_config import positive
from nbengine.models.family import DecoderFamily, layers_of, window_of


class SmolLM3(DecoderFamily):
    """SmolLM 3: every fourth layer has no rotary embedding."""

    title = "SmolLM 3"
    turns_parts = False
    defaults: Mapping[str, Any] = {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    }

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        count = positive(hf, "num_hidden_layers")
        interval = positive(hf, "no_rope_layer_interval", 4)
        turned = hf.get("no_rope_layers") or [int((index + 1) % interval > 0) for index in range(count)]
        if not isinstance(turned, list) or len(turned) < count:
            raise ModelLoadError(
                f"config.json: no_rope_layers must be a list of {count} numbers, got {quoted(turned)}"
            )
        has_windows = hf.get("use_sliding_window") or hf.get("layer_types")
        window = window_of(hf) if has_windows else None
        windows = layers_of(hf, window, {index: not turned[index] for index in range(count)})
        layers = [
            LayerConfig(each.attention, each.size, 0 if turned[index] else None)
            for index, each in enumerate(windows or [LayerConfig()] * count)
        ]
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "mlp_bias": bool(hf.get("mlp_bias", False)),
            "layers": tuple(layers),
        }
