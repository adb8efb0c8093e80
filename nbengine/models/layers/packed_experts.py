"""Experts with matrices of their own, which stay quantised or have biases."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.kernels.dispatch import select_combine
from nbengine.kernels.quantized import Format
from nbengine.kernels.row_kernels import select_gate
from nbengine.kernels.torch.experts import dense_product, sum_of_experts, weighted_sums
from nbengine.models.configs.moe_config import ClampedGate, MoEConfig
from nbengine.models.layers.basic import MergedLinear, Rows
from nbengine.models.layers.mlp import activated
from nbengine.models.layers.weights import DenseWeight, PackedWeight, Place, Slots, Weight, WeightSlot
from nbengine.models.sharding import ExpertShard


def expert_format(
    place: Place, expert: int, projection: str, hidden_size: int, inner: range
) -> Format | None:
    """Return the format of a worker's part of an expert's matrix, which has the inner features `inner`; None:
    it is dense. `place` is that of all experts of the layer."""
    own = place.inside(f"{expert}.{projection}")
    return own.format(len(inner), inner.start) if projection == "down_proj" else own.format(hidden_size)


class PackedExperts:
    """One worker's part of a layer's experts.

    A matrix is quantised or dense by itself; one whose share is no whole number of blocks is dense. Each expert's
    tokens are multiplied with its own matrices, and a row's result depends on nothing but the row.
    """

    def __init__(self, shard: ExpertShard, moe: MoEConfig, hidden_size: int, place: Place) -> None:
        full_inner = moe.intermediate_size
        self.num_experts, self.inner = len(shard.experts), len(shard.inner)
        self._shard = shard
        self._down_shape = (hidden_size, full_inner)
        self._clamped, self._hidden_act = moe.clamped, moe.hidden_act
        self._compiled = None
        if moe.activation == "silu" or not place.is_exact:
            self._compiled = select_gate(place.device, place.hidden_dtype, self.inner, moe.activation)
        self._combine = None
        if place.hidden_dtype is torch.float32:
            self._combine = select_combine(place.device, hidden_size)
        self._gate_up: list[MergedLinear] = []
        self._down: list[Weight] = []
        self._down_bias: list[Tensor | None] = []
        start = shard.inner.start
        parts = [Rows(name, self.inner, full_inner, start) for name, dim in moe.projections if dim == 0]
        self.width = self.inner * len(parts)
        for expert in shard.experts:
            own = place.inside(str(expert))
            self._gate_up.append(MergedLinear(hidden_size, parts, bias=moe.bias, place=own))
            form = expert_format(place, expert, "down_proj", hidden_size, shard.inner)
            self._down.append(own.matrix(hidden_size, self.inner, form))
            # The sum over the workers that divide an expert has its bias once.
            has_bias = moe.bias and start == 0
            self._down_bias.append(own.vector(hidden_size) if has_bias else None)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts; see
        `nbengine.kernels.dispatch.ExpertKernels.experts`."""
        return sum_of_experts(x, self, weights, experts)

    def gate_up(self, expert: int, rows: Tensor, out: Tensor) -> None:
        """See `nbengine.kernels.torch.experts.FeedForwards.gate_up`."""
        merged, first = self._gate_up[expert], 0
        for _, weight in merged.runs:
            behind = first + weight.shape[0]
            _multiply(weight, rows, out[:, first:behind])
            first = behind
        if merged.bias is not None:
            out.add_(merged.bias)

    def activate(self, gated: Tensor) -> Tensor:
        """See `nbengine.kernels.torch.experts.FeedForwards.activate`."""
        if self._compiled is not None:
            return self._compiled(gated)
        if self._clamped is not None:
            return clamped(self._clamped, gated)
        return activated(self._hidden_act, gated)

    def down(self, expert: int, rows: Tensor, out: Tensor) -> None:
        """See `nbengine.kernels.torch.experts.FeedForwards.down`."""
        _multiply(self._down[expert], rows, out)
        bias = self._down_bias[expert]
        if bias is not None:
            out.add_(bias)

    def combine(self, weights: Tensor, outputs: Tensor, places: Tensor) -> Tensor:
        """See `nbengine.kernels.torch.experts.FeedForwards.combine`."""
        if self._combine is None:
            return weighted_sums(weights, outputs, places)
        return self._combine(weights, outputs, places)

    def pairs(self) -> list[tuple[PackedWeight, PackedWeight]]:
        """List each expert's gate and other projection as one matrix, and its last projection, where all are
        quantised."""
        pairs = []
        for gate_up, down in zip(self._gate_up, self._down, strict=True):
            (_, merged), *others = gate_up.runs
            assert not others
            assert isinstance(merged, PackedWeight)
            assert isinstance(down, PackedWeight)
            pairs.append((merged, down))
        return pairs

    def biases(self) -> list[tuple[Tensor | None, Tensor | None]]:
        """List each expert's biases: of gate and other projection, one behind the other, and of the last projection."""
        return [(merged.bias, down) for merged, down in zip(self._gate_up, self._down_bias, strict=True)]

    def slots(self, prefix: str) -> Slots:
        """Yield each expert's weights, or this worker's part of them, under the checkpoint's names."""
        each = zip(self._shard.experts, self._gate_up, self._down, self._down_bias, strict=True)
        for expert, gate_up, down, bias in each:
            yield from gate_up.slots(f"{prefix}.{expert}")
            slot = down.slot(self._down_shape, 1, self._shard.inner.start)
            yield f"{prefix}.{expert}.down_proj.weight", slot
            if bias is not None:
                yield f"{prefix}.{expert}.down_proj.bias", WeightSlot(bias, tuple(bias.shape), 0)


def clamped(config: ClampedGate, gated: Tensor) -> Tensor:
    """Return the clamped gates of `gated` [n, 2 * inner], its first half, times the other half, [n, inner]."""
    gate, up = gated.chunk(2, dim=-1)
    gate = gate.clamp(max=config.limit)
    up = up.clamp(-config.limit, config.limit).add_(1)
    return torch.sigmoid(gate * config.alpha).mul_(gate).mul_(up)


def _multiply(weight: Weight, rows: Tensor, out: Tensor) -> None:
    """Compute `out = rows @ weight.T`; a row's result does not depend on the others."""
    if isinstance(weight, DenseWeight):
        dense_product(rows, weight.tensor, out, weight.products)
    else:
        out.copy_(weight.linear(rows, None))
