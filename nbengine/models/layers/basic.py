"""The building blocks of the models: plain objects around weight tensors, without module hooks.

A block allocates its weights uninitialised and names them: `slots(prefix)` yields the checkpoint's tensor
names with the places (views into fused weights where several are stacked) that a loader fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.kernels.quantized import LANES
from nbengine.kernels.row_kernels import select_rms_norm
from nbengine.models.layers.weights import Place, Slots, Weight, WeightSlot


class Linear:
    """A projection `x @ weight.T + bias` with weight [out_features, in_features] and, optionally, bias
    [out_features]."""

    __slots__ = ("bias", "weight")

    def __init__(self, in_features: int, out_features: int, *, bias: bool, place: Place) -> None:
        self.weight = place.matrix(out_features, in_features, place.format(in_features))
        self.bias = place.vector(out_features) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight.linear(x, self.bias)

    def slots(self, prefix: str) -> Slots:
        """Yield weight and bias under the checkpoint's names."""
        yield f"{prefix}.weight", self.weight.slot(self.weight.shape, 0, 0)
        if self.bias is not None:
            yield f"{prefix}.bias", WeightSlot.whole(self.bias)


@dataclass(frozen=True, slots=True)
class Rows:
    """A range of rows: `size` of the `full_size` rows of the checkpoint's projection `name`, from `start`
    on."""

    name: str
    size: int
    full_size: int
    start: int = 0


class MergedLinear:
    """Several projections of one input as one product: their rows are stacked in the order of `parts`.

    Quantised parts of different formats are products of their own.
    """

    __slots__ = ("bias", "in_features", "runs")

    def __init__(self, in_features: int, parts: Sequence[Rows], *, bias: bool, place: Place) -> None:
        self.in_features = in_features
        self.bias = place.vector(sum(part.size for part in parts)) if bias else None
        self.runs: list[tuple[list[Rows], Weight]] = []
        for run in _runs(in_features, parts, place):
            form = place.inside(run[0].name).format(in_features)
            self.runs.append((run, place.matrix(sum(part.size for part in run), in_features, form)))

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.runs) == 1:
            return self.runs[0][1].linear(x, self.bias)
        out = torch.cat([weight.linear(x, None) for _, weight in self.runs], dim=-1)
        return out if self.bias is None else out.add_(self.bias)

    def slots(self, prefix: str) -> Slots:
        """Yield each part's rows under the checkpoint's name for that projection."""
        for run, weight in self.runs:
            for part, rows in _places(run):
                shape = (part.full_size, self.in_features)
                yield f"{prefix}.{part.name}.weight", weight.slot(shape, 0, part.start, rows)
        if self.bias is not None:
            for part, rows in _places([part for run, _ in self.runs for part in run]):
                slot = WeightSlot(self.bias[rows.start : rows.stop], (part.full_size,), 0, part.start)
                yield f"{prefix}.{part.name}.bias", slot


def _runs(in_features: int, parts: Sequence[Rows], place: Place) -> Iterator[list[Rows]]:
    """Yield neighbouring parts of one format together; each begins with a tile."""
    run: list[Rows] = []
    for part in parts:
        forms = {place.inside(each.name).format(in_features) for each in (*run, part)}
        if len(forms) > 1 or (forms != {None} and run and run[-1].size % LANES):
            yield run
            run = []
        run.append(part)
    yield run


def _places(parts: Sequence[Rows]) -> Iterator[tuple[Rows, range]]:
    """Yield each part with its rows among all of them."""
    first = 0
    for part in parts:
        yield part, range(first, first + part.size)
        first += part.size


class RMSNorm:
    """Root mean square normalisation over the last dimension (Zhang and Sennrich, 2019).

    In a float32 model it is bit for bit what transformers computes; else there is one rounding less, because
    the product with the weight is rounded once, at the end. With `adds_one` the weight is one more than the
    checkpoint has it, and all is computed in float32 (Gemma).
    """

    __slots__ = ("_added", "_compiled", "_is_wide", "eps", "shape", "weight")

    def __init__(self, size: int, eps: float, place: Place, *, adds_one: bool = False) -> None:
        self.weight = place.wide_vector(size) if adds_one else place.vector(size)
        self.shape = (size,)
        self.eps = eps
        self._added = float(adds_one)
        self._is_wide = self.weight.dtype is not place.hidden_dtype
        self._compiled = None
        if not place.is_exact:
            self._compiled = select_rms_norm(self.weight, eps, place.hidden_dtype)

    def __call__(self, x: Tensor) -> Tensor:
        if self._compiled is not None:
            return self._compiled(x)
        if self._is_wide:
            return F.rms_norm(x.float(), self.shape, self.weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def after_adding(self, x: Tensor, added: Tensor, scale: float) -> Tensor:
        """Add `added` [T, size] times `scale` to x [T, size] in place, and return x normalised."""
        if self._compiled is not None:
            return self._compiled.after_adding(x, added, scale)
        return self(x.add_(added if scale == 1 else added * scale))

    def slots(self, prefix: str) -> Slots:
        """Yield the weight under the checkpoint's name."""
        yield f"{prefix}.weight", WeightSlot(self.weight, self.shape, added=self._added)


class LayerNorm:
    """Layer normalisation over the last dimension, with weight and bias (Ba et al., 2016)."""

    __slots__ = ("bias", "eps", "shape", "weight")

    def __init__(self, size: int, eps: float, place: Place) -> None:
        self.weight, self.bias = place.vector(size), place.vector(size)
        self.shape = (size,)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.shape, self.weight, self.bias, self.eps)

    def slots(self, prefix: str) -> Slots:
        """Yield weight and bias under the checkpoint's names."""
        yield f"{prefix}.weight", WeightSlot.whole(self.weight)
        yield f"{prefix}.bias", WeightSlot.whole(self.bias)
