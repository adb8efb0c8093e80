"""The router of DeepSeek's models and others, which chooses experts among the best groups of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nbengine.kernels.dispatch import select_grouped_routing
from nbengine.models.configs.moe_config import GroupedRouting, MoEConfig
from nbengine.models.layers.basic import Linear
from nbengine.models.layers.weights import Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.kernels.cpu.routing import CpuRouting

_LEAST_SUM = 1e-20
_BEST_OF_GROUP = 2


class GroupedRouter(Linear):
    """A router whose weights and arithmetic are float32; see `GroupedRouting`."""

    __slots__ = ("_moe", "_routing", "correction")

    def __init__(self, moe: MoEConfig, routing: GroupedRouting, hidden_size: int, place: Place) -> None:
        super().__init__(hidden_size, moe.num_experts, bias=False, place=replace(place, dtype=torch.float32))
        self._moe = moe
        self._routing = routing
        self.correction = place.wide_vector(moe.num_experts) if routing.has_correction else None

    def compiled(self, device: torch.device, hidden_size: int) -> CpuRouting | None:
        """Return the compiled choice of experts, which takes this router's scores of hidden states in float32; None
        where plain torch has to do it."""
        moe, routing = self._moe, self._routing
        return select_grouped_routing(
            device,
            hidden_size,
            moe.num_experts,
            moe.experts_per_token,
            renormalize=moe.renormalize,
            is_sigmoid=routing.score == "sigmoid",
            correction=self.correction,
            groups=routing.groups,
            chosen_groups=routing.chosen_groups,
            factor=routing.scale,
        )

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the experts of tokens x [T, hidden]; return their weights, float32, and their numbers, int64, both
        [T, experts_per_token]."""
        logits = self(x.float())
        scores = logits.softmax(-1) if self._routing.score == "softmax" else logits.sigmoid()
        # Scores are in the order of logits, which still differ where scores are rounded to one.
        better = logits if self.correction is None else scores + self.correction
        experts = self._of_best_groups(better).topk(self._moe.experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if self._moe.renormalize:
            weights /= weights.sum(-1, keepdim=True) + _LEAST_SUM
        return weights.mul_(self._routing.scale), experts

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from super().slots(prefix)
        if self.correction is not None:
            yield f"{prefix}.e_score_correction_bias", WeightSlot.whole(self.correction)

    def _of_best_groups(self, scores: Tensor) -> Tensor:
        """Return scores [T, experts] with those of groups that are not chosen at minus infinity."""
        groups, chosen = self._routing.groups, self._routing.chosen_groups
        if chosen == groups:
            return scores
        grouped = scores.view(len(scores), groups, -1)
        if self.correction is None:
            of_group = grouped.amax(-1)
        else:
            of_group = grouped.topk(min(_BEST_OF_GROUP, grouped.shape[2]), dim=-1).values.sum(-1)
        best = of_group.topk(chosen, dim=-1).indices
        others = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, value=False)
        return grouped.masked_fill(others[..., None], -torch.inf).flatten(1)
