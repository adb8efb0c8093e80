"""Building blocks of the models: plain objects around weight tensors, without module hooks.

A block allocates its weights uninitialised and names them: `slots(prefix)` yields the checkpoint's tensor
names with the places (views into fused weights where several are stacked) that a loader fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class WeightSlot:
    """Where a tensor of the checkpoint goes: all of it, or what a rank holds of it.

    `tensor` takes, of the checkpoint's tensor of `full_shape`, the indices from `start` on along the dimension
    `dim`, and all along the others; with `dim` None it takes all of it.
    """

    tensor: Tensor
    full_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0

    @classmethod
    def whole(cls, tensor: Tensor) -> WeightSlot:
        """For all of a checkpoint's tensor."""
        return cls(tensor, tuple(tensor.shape))

    @property
    def index(self) -> tuple[slice, ...]:
        """The part of the checkpoint's tensor, for indexing it."""
        if self.dim is None:
            return (slice(None),) * len(self.full_shape)
        here = slice(self.start, self.start + self.tensor.shape[self.dim])
        return (*[slice(None)] * self.dim, here)

    def copy_from(self, other: WeightSlot) -> bool:
        """Copy this part from `other`, a part of the same tensor of the checkpoint; False unless it has all of it."""
        if self.dim is None:
            return False
        offset, size = self.start - other.start, self.tensor.shape[self.dim]
        if offset < 0 or offset + size > other.tensor.shape[self.dim]:
            return False
        self.tensor.copy_(other.tensor.narrow(self.dim, offset, size))
        return True


Slots = Iterator[tuple[str, WeightSlot]]


class Linear:
    """`x @ weight.T + bias` with weight [out_features, in_features] and, optionally, bias [out_features]."""

    __slots__ = ("bias", "weight")

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, prefix: str) -> Slots:
        """Weight and bias under the checkpoint's names."""
        yield f"{prefix}.weight", WeightSlot.whole(self.weight)
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot.whole(self.bias)


@dataclass(frozen=True, slots=True)
class Rows:
    """`size` of the `full_size` rows of the checkpoint's projection `name`, from `start` on."""

    name: str
    size: int
    full_size: int
    start: int = 0


class MergedLinear(Linear):
    """Several projections of one input as one product: their rows are stacked in the order of `parts`."""

    __slots__ = ("parts",)

    def __init__(
        self,
        in_features: int,
        parts: Sequence[Rows],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, sum(part.size for part in parts), bias=bias, dtype=dtype, device=device)
        self.parts = tuple(parts)

    def slots(self, prefix: str) -> Slots:
        """Each part's rows under the checkpoint's name for that projection."""
        first = 0
        for part in self.parts:
            rows = slice(first, first + part.size)
            for kind, fused in (("weight", self.weight), ("bias", self.bias)):
                if fused is not None:
                    full_shape = (part.full_size, *fused.shape[1:])
                    yield f"{prefix}.{part.name}.{kind}", WeightSlot(fused[rows], full_shape, 0, part.start)
            first += part.size


class RMSNorm:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019).

    In float32 bit for bit what transformers computes; in 16-bit types one rounding less, because the product
    with the weight is rounded once, at the end.
    """

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def slots(self, prefix: str) -> Slots:
        """The weight under the checkpoint's name."""
        yield f"{prefix}.weight", WeightSlot.whole(self.weight)


class LayerNorm:
    """Layer normalisation over the last dimension, with weight and bias (Ba et al., 2016)."""

    __slots__ = ("bias", "eps", "shape", "weight")

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.bias = torch.empty(size, dtype=dtype, device=device)
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def slots(self, prefix: str) -> Slots:
        """Weight and bias under the checkpoint's names."""
        yield f"{prefix}.weight", WeightSlot.whole(self.weight)
        yield f"{prefix}.bias", WeightSlot.whole(self.bias)
