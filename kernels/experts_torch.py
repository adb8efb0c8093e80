"""The experts of a layer in plain torch: what the CPU runs, and devices that have no kernels of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class TorchExperts:
    """Sorts the tokens by expert, so that each expert is one product over contiguous rows.

    Experts without tokens cost nothing. A token's experts are summed in float32, in the router's order.
    """

    name = "torch"

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

    A single row of a 16-bit type counts as two, as in `StepInputBuilder`: oneDNN sums it in another order otherwise.
    """
    if len(rows) == 1 and rows.element_size() == 2 and rows.device.type == "cpu":
        out.copy_(F.linear(rows.expand(2, -1), weight)[:1])
    else:
        torch.mm(rows, weight.t(), out=out)
