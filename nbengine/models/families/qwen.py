"""Qwen 1.5 to 3, dense and with experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.checkpoints.tensor_names import TensorPart
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.configs.hf_config import natural, positive
from nbengine.models.configs.moe_config import MoEConfig, num_experts_of
from nbengine.models.families.text_part import TextPart
from nbengine.models.family import DecoderFamily, layers_alike, layers_of, window_of

_WINDOW: Mapping[str, Any] = {"sliding_window": 4096}
"""The window of a configuration that says nothing of it."""
_IMAGES_2: Mapping[str, Any] = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_window_layers": 80,
}
_IMAGES_3: Mapping[str, Any] = {"rope_theta": 5e5}
"""The entries that are assumed of models with images where config.json has none."""


class Qwen2(TextPart):
    """Qwen 1.5, 2 and 2.5; the text of the models with images, too, whose three positions are one in a text."""

    title = "Qwen 1.5, 2, 2.5; Qwen2-VL, 2.5-VL (text)"
    turns_parts = False
    defaults: Mapping[str, Any] = {"num_key_value_heads": 32}

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; null says that there is no window."""
        return super().config(_with_images({**_WINDOW, **hf}, _IMAGES_2))

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        return {"attention_bias": True, "layers": _layers(hf)}


class Qwen3(TextPart):
    """Qwen 3, dense; the text of the models with images, too."""

    title = "Qwen 3; Qwen3-VL (text)"
    turns_parts = False
    defaults: Mapping[str, Any] = {"num_key_value_heads": 32, "head_dim": 128}

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; models with images have no windows, and null says that there is none."""
        return super().config(_with_images({**_WINDOW, **hf}, _IMAGES_3, use_sliding_window=False))

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "qk_norm": True,
            "layers": _layers(hf),
        }


class Qwen2Moe(DecoderFamily):
    """Qwen 1.5 and 2 with experts, and one expert for all tokens."""

    title = "Qwen 1.5, 2 MoE"
    has_experts = True
    turns_parts = False
    defaults: Mapping[str, Any] = {"num_key_value_heads": 16}

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; null says that there is no window."""
        return super().config({**_WINDOW, **hf})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        shared = positive(hf, "shared_expert_intermediate_size", 5632)
        return {
            "attention_bias": bool(hf.get("qkv_bias", True)),
            "moe": experts_of(hf, 60, 4, 1408, shared),
            "layers": _layers(hf, in_turn=True),
        }


class Qwen3Moe(DecoderFamily):
    """Qwen 3 with experts."""

    title = "Qwen 3 MoE"
    has_experts = True
    turns_parts = False
    defaults: Mapping[str, Any] = {"num_key_value_heads": 4}
    usual_experts = (128, 8, 768)
    """The number of experts, that of a token, and the inner features of each, where config.json says nothing."""

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`; null says that there is no window."""
        return super().config({**_WINDOW, **hf})

    def variant(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """See `DecoderFamily.variant`."""
        bias = bool(hf.get("attention_bias", False))
        window = window_of(hf) if hf.get("use_sliding_window", False) else None
        return {
            "attention_bias": bias,
            "attention_out_bias": bias,
            "qk_norm": True,
            "moe": experts_of(hf, *self.usual_experts, 0),
            "layers": layers_alike(hf, window),
        }


class Qwen3VLMoe(TextPart, Qwen3Moe):
    """The text of Qwen3-VL with experts, whose weights are always divided by their sum."""

    title = "Qwen3-VL MoE (text)"
    defaults: Mapping[str, Any] = {**_IMAGES_3, "num_key_value_heads": 16}
    usual_experts = (60, 4, 1408)

    def config(self, hf: Mapping[str, Any]) -> DecoderConfig:
        """See `Family.config`."""
        return super().config({**hf, "norm_topk_prob": True, "use_sliding_window": False})

    def tensor_parts(
        self, config: DecoderConfig, name: str, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, TensorPart]]:
        """See `Family.tensor_parts`; files that were released have the inputs' features of experts first."""
        is_experts = config.moe is not None and len(shape) == 3 and ".mlp.experts." in name
        if not is_experts or shape[2] == self._inputs(config, name):
            yield from super().tensor_parts(config, name, shape)
            return
        turned = (shape[0], shape[2], shape[1])
        for ours, part in super().tensor_parts(config, name, turned):
            yield ours, replace(part, is_transposed=True)

    @staticmethod
    def _inputs(config: DecoderConfig, name: str) -> int:
        assert config.moe is not None
        return config.moe.intermediate_size if name.endswith("down_proj") else config.hidden_size


def _with_images(hf: Mapping[str, Any], defaults: Mapping[str, Any], **own: Any) -> Mapping[str, Any]:
    """Return a configuration that has, if it is of a model with images, `defaults` where it states nothing, and what is
    its `own` whatever it states."""
    if not any("VL" in str(name) for name in hf.get("architectures") or ()):
        return hf
    return {**defaults, **hf, **own}


def _layers(hf: Mapping[str, Any], *, in_turn: bool = False) -> Any:
    """Return the layers; without layer_types those from max_window_layers on have the window, or every second one before
    them."""
    if not hf.get("use_sliding_window", False):
        return ()
    first, count = natural(hf, "max_window_layers", 28), positive(hf, "num_hidden_layers")
    has_window = {
        index: index % 2 == 0 and index < first if in_turn else index >= first for index in range(count)
    }
    return layers_of(hf, window_of(hf), has_window)


def experts_of(hf: Mapping[str, Any], num_experts: int, per_token: int, inner: int, shared: int) -> MoEConfig:
    """Return the experts; the numbers are the values that transformers assumes where config.json says nothing."""
    return MoEConfig(
        num_experts=num_experts_of(hf, num_experts),
        experts_per_token=positive(hf, "num_experts_per_tok", per_token),
        intermediate_size=positive(hf, "moe_intermediate_size", inner),
        renormalize=bool(hf.get("norm_topk_prob", False)),
        shared_intermediate_size=shared,
        sparse_step=positive(hf, "decoder_sparse_step", 1),
        dense_layers=_dense_layers(hf.get("mlp_only_layers") or []),
    )


def _dense_layers(stated: object) -> tuple[int, ...]:
    if not isinstance(stated, list) or not all(isinstance(layer, int) for layer in stated):
        raise ModelLoadError(f"config.json: mlp_only_layers must be a list of integers, got {quoted(stated)}")
    return tuple(stated)
