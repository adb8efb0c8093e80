"""Gemma 4 in GGUF files: the header says the sizes of each type of layers, and a tensor which pairs of a head turn."""

from __future__ import annotations

from typing import Any

from nbengine.errors import ModelLoadError
from nbengine.models.checkpoints.gguf import GGUFHeader
from nbengine.models.checkpoints.gguf_names import ROPE_FACTORS
from nbengine.models.checkpoints.gguf_rope import DEFAULT_THETA, read_factors, theta_of, windows_of

_FULL, _SLIDING = "full_attention", "sliding_attention"
_PERIOD = 6
_STILL = 1e29
"""The least divisor of the frequency of a pair that does not turn."""


def gemma4_entries(header: GGUFHeader) -> dict[str, Any]:
    """Return the entries of config.json that a header of gemma4 describes beside the usual.

    Raises:
        ModelLoadError: its layers have sizes that no released model has.
    """
    windows = windows_of(header, _PERIOD)
    shared = header.integer_or("gemma4.attention.shared_kv_layers", 0)
    inner, is_wide = _inner(header, header.num_layers - shared)
    kv_heads, full_heads = _kv_heads(header, windows)
    cap, inputs = "gemma4.final_logit_softcapping", "gemma4.embedding_length_per_layer_input"
    full = [layer for layer, window in enumerate(windows) if not window]
    has_values = all(
        f"blk.{layer}.attn_v.weight" in header.tensors for layer in full if layer < header.num_layers - shared
    )
    if has_values and full_heads != kv_heads:
        raise ModelLoadError(
            f"{header.path}: full layers with values and {full_heads} key heads of their own are not supported"
        )
    own = header.tensors.get("per_layer_token_embd.weight")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": header.integer("gemma4.attention.key_length_swa"),
        "global_head_dim": header.integer("gemma4.attention.key_length"),
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": full_heads,
        "attention_k_eq_v": not has_values,
        "layer_types": [_SLIDING if window else _FULL for window in windows],
        "num_kv_shared_layers": shared,
        "intermediate_size": inner,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": header.integer_or(inputs, 0),
        "vocab_size_per_layer_input": 1 if own is None else own.shape[0],
        "final_logit_softcapping": header.number(cap) if cap in header.metadata else None,
        "rope_frequency_factors": None,
        "rope_parameters": _ropes(header),
        **_experts(header),
    }


def _experts(header: GGUFHeader) -> dict[str, Any]:
    if not header.integer_or("gemma4.expert_count", 0):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": header.integer("gemma4.expert_count"),
        "top_k_experts": header.integer("gemma4.expert_used_count"),
        "moe_intermediate_size": header.integer("gemma4.expert_feed_forward_length"),
    }


def _inner(header: GGUFHeader, first_shared: int) -> tuple[int, bool]:
    """Return the inner features of a feed-forward block, and whether layers with the keys of others have twice as many."""
    key = "gemma4.feed_forward_length"
    sizes = _integers(header, key)
    first = sizes[0]
    for factor in (1, 2):
        if sizes == [first] * first_shared + [factor * first] * (header.num_layers - first_shared):
            return first, factor == 2
    raise ModelLoadError(f"{header.path}: {key} {sizes} is not supported")


def _kv_heads(header: GGUFHeader, windows: list[bool]) -> tuple[int, int]:
    """Return the key heads of layers with a window, and of the others."""
    key = "gemma4.attention.head_count_kv"
    counts = _integers(header, key)
    found = [
        {count for count, has in zip(counts, windows, strict=True) if has is kind} for kind in (True, False)
    ]
    if any(len(each) != 1 for each in found):
        raise ModelLoadError(
            f"{header.path}: {key} {counts} is not supported: each type of layers has one number"
        )
    ((own,), (full,)) = found
    return own, full


def _integers(header: GGUFHeader, key: str) -> list[int]:
    """Return the integer that each layer has at `key`; a missing or wrong one raises `ModelLoadError`."""
    found = header.per_layer(key)
    if found is None or not all(isinstance(each, int) for each in found):
        return [header.integer(key)] * header.num_layers
    return [int(each) for each in found]


def _ropes(header: GGUFHeader) -> dict[str, Any]:
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta_of(header)}
    if ROPE_FACTORS in header.tensors:
        factors = read_factors(header, ROPE_FACTORS)
        turned = sum(factor < _STILL for factor in factors)
        if any(factor != 1 for factor in factors[:turned]):
            raise ModelLoadError(
                f"{header.path}: the numbers of {ROPE_FACTORS} are not supported: 1, and then 1e30"
            )
        full |= {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}
    theta = header.metadata.get("gemma4.rope.freq_base_swa", DEFAULT_THETA)
    return {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": theta}}
