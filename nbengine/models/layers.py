"""Building blocks of the models: plain objects around weight tensors, without module hooks.

A block allocates its weights uninitialised and names them: `slots(prefix)` yields the checkpoint's tensor
names with the tensors (views into fused weights where several are stacked) that a loader fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Slots = Iterator[tuple[str, Tensor]]


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
        yield f"{prefix}.weight", self.weight
        if self.bias is not None:
            yield f"{prefix}.bias", self.bias


class MergedLinear(Linear):
    """Several projections of one input as one product: their rows are stacked in the order of `parts`."""

    __slots__ = ("parts",)

    def __init__(
        self,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(in_features, sum(size for _, size in parts), bias=bias, dtype=dtype, device=device)
        self.parts = tuple(parts)

    def slots(self, prefix: str) -> Slots:
        """Each part's rows under the checkpoint's name for that projection."""
        start = 0
        for name, size in self.parts:
            yield f"{prefix}.{name}.weight", self.weight[start : start + size]
            if self.bias is not None:
                yield f"{prefix}.{name}.bias", self.bias[start : start + size]
            start += size


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
        yield f"{prefix}.weight", self.weight


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
        yield f"{prefix}.weight", self.weight
        yield f"{prefix}.bias", self.bias
