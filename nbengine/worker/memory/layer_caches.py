"""The memory of a worker's KV cache: the tensors in which its layers' keys, values and states lie."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nbengine.kernels.cpu.huge_pages import zeros_in_huge_pages
from nbengine.kernels.dispatch import RecurrentKernels
from nbengine.kv_cache.specs import CacheGroups
from nbengine.models.causal_model import CausalModel


class RecurrentModel(Protocol):
    """A model some of whose layers have a recurrent state."""

    def new_states(self, num_slots: int) -> list[Any]:
        """Return the memory of `num_slots` states for each recurrent layer of this worker, in the layers' order; it is
        handed to that layer as its cache."""

    def warm_up_recurrent(self, kernels: RecurrentKernels) -> None:
        """Compile what this worker's recurrent layers need."""


def layer_caches(
    model: CausalModel,
    groups: CacheGroups,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    num_slots: int,
) -> list[Any]:
    """Allocate the caches of a worker's layers: one tensor of this shape for the k-th layers of all groups together,
    and the states of recurrent layers."""
    layers, device = model.shard.layers, model.device
    tensors: list[Tensor]
    if device.type == "cpu":
        tensors = [zeros_in_huge_pages(shape, dtype) for _ in range(groups.num_tensors(layers))]
    else:
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(groups.num_tensors(layers))]
    states = cast("RecurrentModel", model).new_states(num_slots) if groups.num_recurrent(layers) else []
    places = groups.tensor_of(layers)
    return [
        (states if groups.layer_groups[layer] == groups.num_tables else tensors)[place]
        for layer, place in zip(layers, places, strict=True)
    ]


def tensors_among(caches: list[Any]) -> list[Tensor]:
    """Return the tensors of keys and values among the caches of layers, each once."""
    return list({id(cache): cache for cache in caches if isinstance(cache, Tensor)}.values())
