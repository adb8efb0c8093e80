"""The sampler: a batch of logits in, one token a row out."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.sampling.draw import draw, draw_filtered
from nbengine.sampling.metadata import RandomRows, SamplingMetadata


class Sampler:
    """Samples every row of a batch, each with its own parameters.

    The order is: float32, banned tokens, then for random rows temperature, min-p, top-k/top-p and the draw.
    A step costs nothing for what no request in the batch asks for.
    """

    def __call__(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        uniform: Tensor | None = None,
        banned: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Sample one token a row.

        Args:
            logits: [N, V], any floating dtype; overwritten where tokens are banned.
            metadata: parameters of the N rows.
            uniform: float64 [N] in [0, 1); only the random rows' entries count, None when there are none.
            banned: row and token indices (int64, broadcast together) that must not be sampled in this step.

        Returns:
            int64 [N]. A greedy row gives the lowest id among equally likely tokens.
        """
        logits = logits.float()
        if banned is not None:
            logits[banned] = -torch.inf
        if uniform is None or not metadata.random:
            return _argmax(logits)
        if metadata.random[0].rows is None:
            return _sample_random(logits, uniform, metadata.random[0])
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        if metadata.greedy_rows is not None:
            tokens[metadata.greedy_rows] = _argmax(logits[metadata.greedy_rows])
        for group in metadata.random:
            tokens[group.rows] = _sample_random(logits[group.rows], uniform[group.rows], group)
        return tokens


def _sample_random(logits: Tensor, uniform: Tensor, group: RandomRows) -> Tensor:
    scaled = logits / group.temperature
    if group.filters is None:
        return draw(scaled, uniform)
    return draw_filtered(scaled, uniform, group.filters)


def _argmax(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        # Same result as torch.argmax, first maximum included, at a sixth of its time.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
