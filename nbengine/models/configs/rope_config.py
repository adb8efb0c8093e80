"""This module reads what a Hugging Face configuration says of the rotary position embedding; it is free of
torch.

The kinds and their formulas are those of transformers' modeling_rope_utils.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nbengine.errors import ModelLoadError, quoted
from nbengine.models.configs.hf_config import number, original_length_of, positive, stated_rope

DEFAULT_THETA = 10000.0
TURNS_PART = "nbengine_turns_part"
"""The entry with which the configuration of a GGUF file says that a part of each head is turned, whatever the class of
transformers would do."""
_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_OLDER_NAMES = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True)
class RopeScaling:
    """The way in which RoPE's frequencies are stretched.

    `linear` divides all of them by `factor`; `llama3` divides those of long wavelength only (Llama 3.1);
    `frequency_factors` divides each by its own number (llama.cpp); `yarn` divides those that turn less than
    `low_freq_factor` times in the original context and keeps those that turn more than `high_freq_factor` times
    (Peng et al., 2023); `longrope` divides each by its own number, by `frequency_factors` in models for up to
    `original_max_position_embeddings` tokens and by `long_factors` in others (Ding et al., 2024); `dynamic` raises
    their base in models for more than `original_max_position_embeddings` tokens; `proportional` keeps the first `part`
    of them, and the others are zero. The cosines and sines are multiplied
    by `attention_factor`. `truncate`: the bounds of YaRN are whole numbers.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    frequency_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    truncate: bool = True
    part: float = 1.0


@dataclass(frozen=True)
class Rope:
    """A rotary embedding: its base, and the way in which its frequencies are stretched. It turns the first `size`
    dimensions of a head; 0: as many as the model's others."""

    theta: float = DEFAULT_THETA
    scaling: RopeScaling | None = None
    size: int = 0


def rope_of(hf: Mapping[str, Any], stated: Mapping[str, Any], theta: float = DEFAULT_THETA) -> Rope:
    """Return the rotary embedding of which a configuration says `stated`; `theta` is the base where it says
    none.

    Raises:
        ModelLoadError: a value is missing or wrong, or the kind of scaling is not supported.
    """
    base = number(stated, "rope_theta", number(hf, "rope_theta", theta))
    kind = str(stated.get("rope_type", stated.get("type", "default")))
    kind = _OLDER_NAMES.get(kind, kind)
    factors = hf.get("rope_frequency_factors")
    if kind == "default" and factors is not None:
        return Rope(base, RopeScaling("frequency_factors", frequency_factors=tuple(factors)))
    match kind:
        case "default":
            return Rope(base)
        case "dynamic":
            length = positive(hf, "max_position_embeddings")
            factor = number(stated, "factor", 1.0)
            return Rope(base, RopeScaling("dynamic", factor, original_max_position_embeddings=length))
        case "linear":
            return Rope(base, RopeScaling("linear", factor=number(stated, "factor")))
        case "llama3":
            return Rope(base, _llama3(hf, stated))
        case "yarn":
            return Rope(base, _yarn(hf, stated))
        case "proportional":
            factor, part = number(stated, "factor", 1.0), number(stated, "partial_rotary_factor", 1.0)
            return Rope(base, RopeScaling("proportional", factor, part=part))
        case "longrope":
            return Rope(base, _longrope(hf, stated))
    raise ModelLoadError(f"RoPE scaling {kind!r} is not supported; supported are {', '.join(_KINDS)}")


def ropes_of_types(hf: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what a configuration says of the rotary embeddings of full layers and of those with a window; what it
    says of no type of layer is about full ones.

    Raises:
        ModelLoadError: what it says of a type is no object.
    """
    stated = stated_rope(hf)
    full, local = stated.get("full_attention"), stated.get("sliding_attention")
    if full is None and local is None:
        return stated, {}
    full, local = full or {}, local or {}
    if not (isinstance(full, Mapping) and isinstance(local, Mapping)):
        raise ModelLoadError(
            f"config.json: rope_parameters must have an object for each type of layer, got {quoted(stated)}"
        )
    return full, local


def rotary_dim_of(
    hf: Mapping[str, Any], stated: Mapping[str, Any], head_dim: int, default: float = 1.0
) -> int:
    """Return how many dimensions of a head are turned, 0 for all, `default` being their part where nothing is said.

    Raises:
        ModelLoadError: the part is no number in (0, 1], or gives an odd number of dimensions.
    """
    part = number(stated, "partial_rotary_factor", number(hf, "partial_rotary_factor", default))
    if part == 1:
        return 0
    size = int(head_dim * part)
    if part > 1 or size < 2 or size % 2:
        raise ModelLoadError(
            f"config.json: a partial_rotary_factor of {part} turns {size} of {head_dim} dimensions, which must be an "
            "even number"
        )
    return size


def _llama3(hf: Mapping[str, Any], stated: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        "llama3",
        factor=number(stated, "factor"),
        low_freq_factor=number(stated, "low_freq_factor"),
        high_freq_factor=number(stated, "high_freq_factor"),
        original_max_position_embeddings=_original_of(hf, stated),
    )


def _yarn(hf: Mapping[str, Any], stated: Mapping[str, Any]) -> RopeScaling:
    longest = positive(hf, "max_position_embeddings")
    original = _original_of(hf, stated)
    factor = number(stated, "factor", longest / original)
    attention = stated.get("attention_factor")
    if attention is None:
        mscale, all_dim = stated.get("mscale"), stated.get("mscale_all_dim")
        attention = (
            mscale_of(factor, number(stated, "mscale")) / mscale_of(factor, number(stated, "mscale_all_dim"))
            if mscale and all_dim
            else mscale_of(factor)
        )
    return RopeScaling(
        "yarn",
        factor=factor,
        low_freq_factor=number(stated, "beta_slow", 1.0),
        high_freq_factor=number(stated, "beta_fast", 32.0),
        original_max_position_embeddings=original,
        attention_factor=float(attention),
        truncate=bool(stated.get("truncate", True)),
    )


def mscale_of(factor: float, mscale: float = 1.0) -> float:
    """Return by what YaRN multiplies cosines and sines in a context that is `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(hf: Mapping[str, Any], stated: Mapping[str, Any]) -> RopeScaling:
    longest = positive(hf, "max_position_embeddings")
    original = _original_of(hf, stated)
    factor = number(stated, "factor", longest / original)
    attention = stated.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeScaling(
        "longrope",
        factor=factor,
        original_max_position_embeddings=original,
        frequency_factors=_factors(stated, "short_factor"),
        long_factors=_factors(stated, "long_factor"),
        attention_factor=float(attention),
    )


def _original_of(hf: Mapping[str, Any], stated: Mapping[str, Any]) -> int:
    original = original_length_of(hf, stated)
    return positive(hf, "max_position_embeddings") if original is None else original


def _factors(stated: Mapping[str, Any], key: str) -> tuple[float, ...]:
    value = stated.get(key)
    if not isinstance(value, list) or not all(isinstance(each, int | float) and each > 0 for each in value):
        raise ModelLoadError(f"config.json: {key} must be a list of positive numbers, got {quoted(value)}")
    return tuple(map(float, value))
