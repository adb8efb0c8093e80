"""This module says in the terms of Hugging Face what a GGUF header says of the rotary embedding and of windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader
from nbengine.models.checkpoints.gguf_names import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS
from nbengine.models.configs.rope_config import TURNS_PART

_KINDS = ("none", "linear", "yarn", "longrope")
_YARN_NUMBERS = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
DEFAULT_THETA = 10000.0


def head_dim_of(header: GGUFHeader) -> int:
    """Return the dimensions of a head; a missing or wrong value raises `ModelLoadError`."""
    arch = header.architecture
    heads, hidden = header.largest(f"{arch}.attention.head_count"), header.integer(f"{arch}.embedding_length")
    if heads < 1:
        raise ModelLoadError(f"{header.path}: {arch}.attention.head_count is {heads}")
    return header.integer_or(f"{arch}.attention.key_length", hidden // heads)


def rope_entries(header: GGUFHeader) -> dict[str, Any]:
    """Return the entries of config.json for the rotary embedding."""
    entries: dict[str, Any] = {"rope_parameters": rope_parameters(header)}
    if "partial_rotary_factor" in entries["rope_parameters"]:
        entries[TURNS_PART] = True
    if ROPE_FACTORS in header.tensors:
        entries["rope_frequency_factors"] = read_factors(header, ROPE_FACTORS)
    return entries


def rope_parameters(header: GGUFHeader) -> dict[str, Any]:
    """Return `rope_parameters` of config.json: base, part of a head that is turned, and way of stretching.

    Raises:
        ModelLoadError: the way is not supported, or a number of it is missing.
    """
    scaling = f"{header.architecture}.rope.scaling"
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta_of(header)}
    head_dim = head_dim_of(header)
    rotary = header.integer_or(f"{header.architecture}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        parameters["partial_rotary_factor"] = rotary / head_dim
    kind = header.metadata.get(f"{scaling}.type", "none")
    if kind not in _KINDS:
        raise ModelLoadError(
            f"{header.path}: RoPE scaling {kind!r} is not supported; supported are {', '.join(_KINDS)}"
        )
    if LONG_FACTORS in header.tensors or kind == "longrope":
        return {**parameters, **_longrope(header, scaling)}
    if kind == "linear":
        linear = {"rope_type": "linear", "factor": header.number(f"{scaling}.factor")}
        original = f"{scaling}.original_context_length"
        if original in header.metadata:
            linear["original_max_position_embeddings"] = header.integer(original)
        return {**parameters, **linear}
    return {**parameters, **_yarn(header, scaling)} if kind == "yarn" else parameters


def theta_of(header: GGUFHeader) -> float:
    """Return the base of the rotary embedding."""
    key = f"{header.architecture}.rope.freq_base"
    return header.number(key) if key in header.metadata else DEFAULT_THETA


def _longrope(header: GGUFHeader, scaling: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": read_factors(header, SHORT_FACTORS),
        "long_factor": read_factors(header, LONG_FACTORS),
    }
    original, attention = f"{scaling}.original_context_length", f"{scaling}.attn_factor"
    if original in header.metadata:
        found["original_max_position_embeddings"] = header.integer(original)
    if attention in header.metadata:
        found["attention_factor"] = header.number(attention)
    return found


def _yarn(header: GGUFHeader, scaling: str) -> dict[str, Any]:
    extrapolated = f"{scaling}.yarn_ext_factor"
    if header.metadata.get(extrapolated, 1.0) != 1.0:
        raise ModelLoadError(
            f"{header.path}: {extrapolated} is {header.metadata[extrapolated]}; only 1 is supported"
        )
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": header.number(f"{scaling}.factor"),
        "original_max_position_embeddings": header.integer(f"{scaling}.original_context_length"),
    }
    for key, hf in _YARN_NUMBERS.items():
        if f"{scaling}.{key}" in header.metadata:
            found[hf] = header.number(f"{scaling}.{key}")
    log_multiplier = f"{scaling}.yarn_log_multiplier"
    if header.metadata.get(log_multiplier):
        found |= {"mscale": 1.0, "mscale_all_dim": header.number(log_multiplier)}
    return found


def read_factors(header: GGUFHeader, name: str) -> list[float]:
    """Read a tensor of factors for rotary frequencies.

    Raises:
        ModelLoadError: it is missing, truncated, or not of 32-bit floats.
    """
    tensor = header.tensors.get(name)
    if tensor is None:
        raise ModelLoadError(f"{header.path}: tensor {name} is missing")
    if tensor.type.name != "F32":
        raise ModelLoadError(f"{header.path}: {name} is {tensor.type.name}, not F32")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        raw = file.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        raise ModelLoadError(f"{header.path}: truncated in {name}")
    factors: list[float] = np.frombuffer(raw, dtype="<f4").tolist()
    return factors


def window_of(header: GGUFHeader) -> int:
    """Return the tokens that layers with a window see; 0: there is none, which Phi-4's files say so."""
    return header.integer_or(f"{header.architecture}.attention.sliding_window", 0)


def windows_of(header: GGUFHeader, period: int) -> list[bool]:
    """Return whether each layer has a window: the file says it of each, or gives the distance of those that have
    none, which is `period` if it says nothing."""
    key = f"{header.architecture}.attention.sliding_window_pattern"
    if not window_of(header):
        return [False] * header.num_layers
    if isinstance(header.metadata.get(key), tuple):
        return [bool(each) for each in header.per_layer(key) or ()]
    stated = header.integer_or(key, period)
    return [not stated or (layer + 1) % stated != 0 for layer in range(header.num_layers)]
