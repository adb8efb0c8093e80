"""The experts of a layer in plain torch: what the CPU runs, and devices that have no kernels of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_FEW_ROWS = 32
_LARGE_WEIGHT = 1 << 17  # of smaller ones the copy would cost more than it saves


class TorchExperts:
    """Sorts the tokens by expert, so that each expert is one product over contiguous rows.

    Experts without tokens cost nothing. A token's experts are summed in float32, in the router's order.
    """

    name = "torch"

    def warm_up(self, gate_up: torch.Tensor, down: torch.Tensor, experts_per_token: int) -> None:
        """Nothing to compile."""

    def experts(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
    ) -> torch.Tensor:
        """See `nbengine.kernels.dispatch.ExpertKernels.experts`."""
        num_experts, hidden_size, inner = down.shape
        num_tokens, per_token = experts.shape
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        spans = _spans(chosen.bincount(minlength=num_experts + 1)[:num_experts].tolist())
        num_rows = spans[-1][2] if spans else 0
        rows = x[order[:num_rows] // per_token]
        gated = x.new_empty(num_rows, 2 * inner)
        for expert, start, stop in spans:
            _product(rows[start:stop], gate_up[expert], gated[start:stop])
        activated = F.silu(gated[:, :inner]).mul_(gated[:, inner:])
        outputs = x.new_empty(len(order), hidden_size)
        outputs[num_rows:].zero_()
        for expert, start, stop in spans:
            _product(activated[start:stop], down[expert], outputs[start:stop])
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        by_token = outputs[place].view(num_tokens, per_token, hidden_size)
        return torch.bmm(weights.unsqueeze(1), by_token.float()).squeeze(1).to(x.dtype)


def _spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """(expert, first row, row after the last) of the experts that have rows."""
    spans = []
    start = 0
    for expert, count in enumerate(counts):
        if count:
            spans.append((expert, start, start + count))
            start += count
    return spans


def _product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`out = rows @ weight.T`.

    On the CPU a single row of a 16-bit type counts as two, as in `StepInputBuilder`: oneDNN sums it in another order
    otherwise. Few rows of float32 are computed as `weight @ rows.T`, from two rows on: MKL needs a third to a half of
    the time for that (measured with up to 32 rows and a weight of 1024 by 768).
    """
    on_cpu = rows.device.type == "cpu"
    if on_cpu and len(rows) == 1 and rows.element_size() == 2:
        out.copy_(F.linear(rows.expand(2, -1), weight)[:1])
    elif on_cpu and rows.element_size() == 4 and len(rows) <= _FEW_ROWS and weight.numel() >= _LARGE_WEIGHT:
        two_or_more = rows if len(rows) > 1 else rows.repeat(2, 1)
        out.copy_(torch.mm(weight, two_or_more.t())[:, : len(rows)].t())
    else:
        torch.mm(rows, weight.t(), out=out)
