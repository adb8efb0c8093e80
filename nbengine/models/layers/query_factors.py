"""The factors of queries that grow with the position, which keep attention sharp over long texts (Nakanishi, 2025)."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.models.configs.decoder_config import QueryGrowth


class QueryFactors:
    """The factors of all positions up to `max_positions`, in float32: a position has the same bits in every batch."""

    def __init__(self, growth: QueryGrowth, max_positions: int, device: torch.device) -> None:
        # "meta" has no numbers, and torch would import its compiler.
        self.table = torch.empty(max_positions, 1, 1, dtype=torch.float32, device=device)
        if device.type != "meta":
            positions = torch.arange(max_positions, dtype=torch.float32, device=device)
            steps = torch.floor((positions + growth.ahead) / growth.step)
            self.table.view(-1).copy_(torch.log1p(steps) * growth.rate + 1.0)

    def at(self, positions: Tensor) -> Tensor:
        """Return the factors [T, 1, 1] of queries [T, heads, head_dim] at positions [T] int64."""
        return self.table.index_select(0, positions)
