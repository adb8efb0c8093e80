"""The memory of a worker's KV cache: the tensors in which its layers' keys, values and states lie."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor

from nbengine.kernels.cpu.huge_pages import zeros_in_huge_pages
from nbengine.kernels.dispatch import RecurrentKernels
from nbengine.kernels.kv_cache import cache_shape
from nbengine.kv_cache.specs import CacheGroups
from nbengine.models.causal_model import CausalModel
from nbengine.models.sharding import DecoderShard
from nbengine.worker.memory.cache_rows import CacheRows


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
    rows: CacheRows,
    dtype: torch.dtype,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
) -> list[Any]:
    """Allocate the caches of a worker's layers: one tensor for the k-th layers of all groups together, of which each
    has a view with its heads, and the states of recurrent layers."""
    layers, device = model.shard.layers, model.device
    shape = (model.config.cache_parts, num_blocks, 1, block_size, rows.widest)
    tensors: list[Tensor]
    if device.type == "cpu":
        tensors = [zeros_in_huge_pages(shape, dtype) for _ in range(groups.num_tensors(layers))]
    else:
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(groups.num_tensors(layers))]
    states = cast("RecurrentModel", model).new_states(num_slots) if groups.num_recurrent(layers) else []
    found: list[Any] = []
    for layer, place in zip(layers, groups.tensor_of(layers), strict=True):
        group = groups.layer_groups[layer]
        if group == groups.num_tables:
            found.append(states[place])
            continue
        own = model.config.of_layer(layer)
        heads = DecoderShard.of(own, model.layout).num_kv_heads
        count = num_blocks * rows.spreads[group]
        found.append(
            tensors[place].view(cache_shape(dtype, count, heads, block_size, own.head_dim, own.cache_parts))
        )
    return found


def tensors_among(caches: list[Any]) -> list[Tensor]:
    """Return the tensors of keys and values among the caches of layers, one for each piece of memory."""
    return list({cache.data_ptr(): cache for cache in caches if isinstance(cache, Tensor)}.values())
