"""The sampler: a batch of logits in, one token a row out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nbengine.sampling.draw import draw, draw_filtered
from nbengine.sampling.metadata import RandomRows, Rows, SamplingMetadata

_CPU_PIECE_BYTES = 4 << 20
"""On a CPU rows are sampled in pieces of this size: then temporaries stay in cache, and the allocator gives them
memory that it has instead of new pages (a vocabulary of 150,000 takes a sixth of the time)."""


class Sampler:
    """Samples every row of a batch, each with its own parameters.

    The order is: banned tokens, float32, then for random rows temperature, min-p, top-k/top-p and the draw.
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
            uniform: float64 [N] in [0, 1); only random rows' entries count, None when there are no such rows.
            banned: row and token indices (int64, broadcast together) that must not be sampled in this step.

        Returns:
            int64 [N]. A greedy row gives the lowest id among equally likely tokens.
        """
        if banned is not None:
            logits[banned] = -torch.inf
        tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        if metadata.greedy_rows is not None:
            for rows, _ in _pieces(metadata.greedy_rows, logits):
                tokens[rows] = _argmax(logits[rows].float())
        if uniform is not None:
            for group in metadata.random:
                for rows, members in _pieces(group.rows, logits):
                    tokens[rows] = _sample(logits[rows].float(), uniform[rows], group, members)
        return tokens


def _pieces(rows: Rows, logits: Tensor) -> Iterator[tuple[Rows, slice]]:
    """Cut rows of `logits` into pieces; each with its place among `rows`."""
    count, vocab = logits.shape
    if isinstance(rows, Tensor):
        count = len(rows)
    size = max(1, _CPU_PIECE_BYTES // (4 * vocab)) if logits.device.type == "cpu" else count
    for start in range(0, count, size):
        members = slice(start, start + size)
        yield (rows[members] if isinstance(rows, Tensor) else members), members


def _sample(logits: Tensor, uniform: Tensor, group: RandomRows, members: slice) -> Tensor:
    scaled = logits / group.temperature[members]
    if group.filters is None:
        return draw(scaled, uniform)
    return draw_filtered(scaled, uniform, group.filters.select(members))


def _argmax(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        # The same result as torch.argmax, the first of equal maxima, at a sixth of its time.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
