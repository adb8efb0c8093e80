"""The parameters of the native decoder, and how Hugging Face configurations map to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.encoder_config import ARCHITECTURES as ENCODERS
from nbengine.models.encoder_config import num_labels_of
from nbengine.models.hf_config import number, positive
from nbengine.models.moe_config import ARCHITECTURES as MOE_ARCHITECTURES
from nbengine.models.moe_config import MoEConfig, moe_config

_MAX_LAYERS = 4096
_DEFAULT_ROPE_THETA = 10000.0
_ACTIVATIONS = ("silu",)
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    *MOE_ARCHITECTURES,
)
_CLASSIFIERS = {name.replace("CausalLM", "SequenceClassification"): name for name in ARCHITECTURES}
"""Decoders with a classification head, and the class whose decoder they have."""


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE's frequencies are stretched.

    `linear` divides all of them by `factor`; `llama3` divides those of long wavelength only (Llama 3.1, as in
    transformers' modeling_rope_utils.py); `frequency_factors` divides each by its own number (llama.cpp).
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and variants of a Llama-style decoder.

    `attention_bias` is for the q, k and v projections, `attention_out_bias` for the output projection;
    `qk_norm` normalises queries and keys per head before RoPE (Qwen3). `num_labels` is 0 unless the model has a
    classification head in place of its output projection. `moe` has the experts that some layers, or all, have in
    place of one feed-forward block; `intermediate_size` is that of the other layers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    hidden_act: str = "silu"
    num_labels: int = 0
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        if self.num_layers > _MAX_LAYERS:
            raise ModelLoadError(f"num_hidden_layers is {self.num_layers}, more than {_MAX_LAYERS}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim must be even, got {self.head_dim}")
        if self.hidden_act not in _ACTIVATIONS:
            raise ModelLoadError(
                f"hidden_act {self.hidden_act!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
            )


def decoder_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Map a Hugging Face configuration to the native decoder's.

    Raises:
        ModelLoadError: the architecture or one of its variants is not supported, or a value is missing or wrong.
    """
    names = hf.get("architectures") or []
    for name in names:
        base = _CLASSIFIERS.get(name, name)
        if base in ARCHITECTURES:
            return _common({**_CLASS_DEFAULTS.get(base, {}), **hf}, _variant(base, hf))
    raise ModelLoadError(
        f"architecture {', '.join(map(str, names)) or 'unknown (config.json has no architectures)'} is not "
        f"supported; supported are {', '.join((*ARCHITECTURES, *_CLASSIFIERS, *ENCODERS))}"
    )


def _variant(architecture: str, hf: Mapping[str, Any]) -> dict[str, Any]:
    bias = bool(hf.get("attention_bias", False))
    match architecture:
        case "LlamaForCausalLM":
            mlp_bias = bool(hf.get("mlp_bias", False))
            return {"attention_bias": bias, "attention_out_bias": bias, "mlp_bias": mlp_bias}
        case "Qwen2ForCausalLM":
            return {"attention_bias": True}
        case "Qwen3ForCausalLM":
            return {"attention_bias": bias, "attention_out_bias": bias, "qk_norm": True}
        case "Qwen2MoeForCausalLM":
            qkv_bias = bool(hf.get("qkv_bias", True))
            return {"attention_bias": qkv_bias, "moe": moe_config(architecture, hf)}
        case "Qwen3MoeForCausalLM":
            experts = moe_config(architecture, hf)
            return {"attention_bias": bias, "attention_out_bias": bias, "qk_norm": True, "moe": experts}
        case "MixtralForCausalLM":
            return {"moe": moe_config(architecture, hf)}
        case _:
            return {}


_CLASS_DEFAULTS: dict[str, dict[str, int | float]] = {
    "MistralForCausalLM": {"num_key_value_heads": 8},
    "MixtralForCausalLM": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32},
    "Qwen2MoeForCausalLM": {"num_key_value_heads": 16},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
    "Qwen3MoeForCausalLM": {"num_key_value_heads": 4},
}
"""What transformers assumes where config.json says nothing, apart from what all classes share."""


def _common(hf: Mapping[str, Any], variant: Mapping[str, Any]) -> DecoderConfig:
    hidden_size = positive(hf, "hidden_size")
    num_heads = positive(hf, "num_attention_heads")
    theta, scaling = _rope(hf)
    return DecoderConfig(
        vocab_size=positive(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(hf, "intermediate_size"),
        num_layers=positive(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=positive(hf, "num_key_value_heads", num_heads),
        head_dim=positive(hf, "head_dim", hidden_size // num_heads),
        rms_norm_eps=number(hf, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=positive(hf, "max_position_embeddings"),
        tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
        hidden_act=str(hf.get("hidden_act", "silu")),
        num_labels=num_labels_of(hf),
        **variant,
    )


def _rope(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """RoPE's base and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    stated = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(stated, Mapping):
        raise ModelLoadError(f"config.json: rope_parameters must be an object, got {stated!r}")
    default_theta = number(hf, "rope_theta", _DEFAULT_ROPE_THETA)
    theta = number(stated, "rope_theta", default_theta)
    if number(stated, "partial_rotary_factor", 1.0) != 1.0 or hf.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError("config.json: a partial_rotary_factor other than 1 is not supported")
    kind = stated.get("rope_type", stated.get("type", "default"))
    factors = hf.get("rope_frequency_factors")
    if factors is not None and kind == "default":
        return theta, RopeScaling("frequency_factors", frequency_factors=tuple(factors))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", factor=number(stated, "factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=number(stated, "factor"),
            low_freq_factor=number(stated, "low_freq_factor"),
            high_freq_factor=number(stated, "high_freq_factor"),
            original_max_position_embeddings=positive(stated, "original_max_position_embeddings"),
        )
    raise ModelLoadError(f"RoPE scaling {kind!r} is not supported; supported are default, linear, llama3")
