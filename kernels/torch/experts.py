"""The experts of a layer in plain torch, for the CPU and for devices without their own kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from nbengine.kernels.dense_kernels import DenseProducts

_FEW_ROWS = 32
_LARGE_WEIGHT = 1 << 17  # of smaller ones the copy would cost more than it saves


class FeedForwards(Protocol):
    """The gated feed-forward blocks of a layer's experts, with weights of any kind."""

    num_experts: int
    width: int
    """The numbers of a row before the activation: twice the inner features of a block, or these where there is no
    gate."""

    def gate_up(self, expert: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply rows [n, hidden] with the gate, if there is one, and the other projection of an expert; `out` is
        [n, width], the gate first."""

    def activate(self, gated: torch.Tensor) -> torch.Tensor:
        """Return what goes into the last projection, [n, inner]: usually silu of the first half of each row of `gated`
        [n, width] times the second half."""

    def down(self, expert: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Multiply rows [n, inner] with the last projection of an expert; `out` is [n, hidden]."""

    def combine(self, weights: torch.Tensor, outputs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the sums [T, hidden] of rows of outputs [N, hidden], taken in float32: those at places [T, n],
        int64, times weights [T, n], float32."""


def sum_of_experts(
    x: torch.Tensor, blocks: FeedForwards, weights: torch.Tensor, experts: torch.Tensor
) -> torch.Tensor:
    """Return what `nbengine.kernels.dispatch.ExpertKernels.experts` does of these blocks.

    The tokens are sorted by expert, so that each expert has contiguous rows. Experts without tokens cost
    nothing. A token's experts are summed in float32, in the router's order.
    """
    num_experts, hidden_size = blocks.num_experts, x.shape[1]
    per_token = experts.shape[1]
    chosen = experts.flatten()
    order = chosen.argsort(stable=True)
    spans = _spans(chosen.bincount(minlength=num_experts + 1)[:num_experts].tolist())
    num_rows = spans[-1][2] if spans else 0
    rows = x[order[:num_rows] // per_token]
    gated = x.new_empty(num_rows, blocks.width)
    for expert, start, stop in spans:
        blocks.gate_up(expert, rows[start:stop], gated[start:stop])
    activated = blocks.activate(gated)
    outputs = x.new_empty(len(order), hidden_size)
    outputs[num_rows:].zero_()
    for expert, start, stop in spans:
        blocks.down(expert, activated[start:stop], outputs[start:stop])
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return blocks.combine(weights, outputs, place.view(experts.shape))


def weighted_sums(weights: torch.Tensor, outputs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """See `FeedForwards.combine`."""
    by_token = outputs[places].float()
    return torch.bmm(weights.unsqueeze(1), by_token).squeeze(1).to(outputs.dtype)


class TorchExperts:
    """Kernels for dense experts, each of which is one product over the rows that go to it."""

    name = "torch"

    def __init__(self, products: DenseProducts | None = None) -> None:
        """`products` multiply in place of torch."""
        self._products = products

    def warm_up(self, gate_up: torch.Tensor, down: torch.Tensor, experts_per_token: int) -> None:
        """Do nothing: there is nothing to compile."""

    def experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.ExpertKernels.experts`."""
        return sum_of_experts(x, _Dense(gate_up, down, self._products), weights, experts)


class _Dense:
    """Blocks whose weights lie in two tensors."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, products: DenseProducts | None) -> None:
        self._gate_up, self._down, self._products = gate_up, down, products
        self.num_experts, self.width, _ = gate_up.shape

    def gate_up(self, expert: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `FeedForwards.gate_up`."""
        dense_product(rows, self._gate_up[expert], out, self._products)

    def activate(self, gated: torch.Tensor) -> torch.Tensor:
        """See `FeedForwards.activate`."""
        return silu_and_mul(gated)

    def down(self, expert: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """See `FeedForwards.down`."""
        dense_product(rows, self._down[expert], out, self._products)

    def combine(self, weights: torch.Tensor, outputs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """See `FeedForwards.combine`."""
        return weighted_sums(weights, outputs, places)


def silu_and_mul(gated: torch.Tensor) -> torch.Tensor:
    """See `FeedForwards.activate`."""
    gate, up = gated.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def _spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """List the experts that have rows: (expert, first row, row after the last)."""
    spans = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, start, start + count))
            start += count
    return spans


def dense_product(
    rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, products: DenseProducts | None = None
) -> None:
    """Compute `out = rows @ weight.T`, with `products` if there are any; rows and result may be of another type than
    the weight, to which the rows are rounded.

    On the CPU few rows of float32 are computed as `weight @ rows.T`, from two rows on: MKL needs a third to a half of
    the time for that (measured with up to 32 rows and a weight of 1024 by 768).
    """
    if products is not None:
        products.linear(rows, weight, out=out)
        return
    if rows.dtype is not weight.dtype:
        narrow = out.new_empty(out.shape, dtype=weight.dtype)
        dense_product(rows.to(weight.dtype), weight, narrow)
        out.copy_(narrow)
        return
    on_cpu = rows.device.type == "cpu"
    if on_cpu and rows.element_size() == 4 and len(rows) <= _FEW_ROWS and weight.numel() >= _LARGE_WEIGHT:
        two_or_more = rows if len(rows) > 1 else rows.repeat(2, 1)
        out.copy_(torch.mm(weight, two_or_more.t())[:, : len(rows)].t())
    else:
        torch.mm(rows, weight.t(), out=out)
