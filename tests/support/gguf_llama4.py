"""Llama 4 as llama.cpp's converter has it: it turns the matrices of experts round, leaves queries and keys as they are,
and writes the factors of rotary frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

STACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""The endings of the names of all experts' matrices in one, which have the inputs' features first."""


def metadata(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The metadata that its class writes besides, or otherwise."""
    yield "llama4.feed_forward_length", config["intermediate_size_mlp"]
    yield "llama4.expert_feed_forward_length", config["intermediate_size"]
    yield "llama4.interleave_moe_layer_step", config["interleave_moe_layer_step"]


def turned(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The matrices of experts that a tensor of a checkpoint has, under names of its projections."""
    before, _, projection = name.rpartition(".")
    if projection == "down_proj":
        yield f"{name}.weight", tensor.mT
        return
    for part, half in zip(("gate_proj", "up_proj"), tensor.mT.chunk(2, dim=1), strict=True):
        yield f"{before}.{part}.weight", half


def frequency_factors(rope: dict[str, Any], head_dim: int) -> Tensor:
    """Each rotary frequency is divided by its number."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    context, factors = rope["original_max_position_embeddings"], []
    for frequency in 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)):
        length = 2 * math.pi / float(frequency)
        if length < context / high:
            factors.append(1.0)
        elif length > context / low:
            factors.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)
