"""Log probabilities of tokens and of the most likely ones, from logits as the model gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nbengine.ipc.messages import LogprobsLists
from nbengine.sampling.rows import ALL_ROWS, Rows, pieces


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows for which log probabilities are wanted."""

    rows: Rows
    """The indices of R rows of the batch."""
    positions: list[int]
    """The same rows, on the host."""
    counts: list[int]
    """The number of most likely tokens that each row wants."""


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log probabilities at R positions: of the token itself first, then of the K most likely ones."""

    token_ids: Tensor
    """int64 [R, K + 1]"""
    logprobs: Tensor
    """float32 [R, K + 1]"""
    ranks: Tensor
    """int64 [R], the number of tokens that are at least as likely as the token itself."""

    def to_lists(self, counts: Sequence[int]) -> list[LogprobsLists]:
        """Make one message a position, with `counts[i]` of the most likely tokens."""
        token_ids, logprobs, ranks = (part.tolist() for part in (self.token_ids, self.logprobs, self.ranks))
        return [
            LogprobsLists([token_ids[i][: k + 1]], [logprobs[i][: k + 1]], [ranks[i]])
            for i, k in enumerate(counts)
        ]


def compute_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> LogprobsTensors:
    """Return log softmax of the logits, at each row's token and at its `num_top` largest values.

    Equally likely tokens come in the order of their ids, whatever the batch and the device.

    Args:
        logits: [R, V], any floating dtype.
        token_ids: int64 [R]
        num_top: K, at most V.
    """
    columns = token_ids[:, None]
    parts = [
        _of_piece(logits[members].float(), columns[members], num_top)
        for _, members in pieces(ALL_ROWS, logits, bounded=True)
    ]
    ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
    return LogprobsTensors(ids, logprobs, ranks)


def _of_piece(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    peak = logits.amax(-1, keepdim=True)
    # This is the log-sum-exp, computed from the largest probability: softmax reads the logits faster than logsumexp.
    log_mass = peak - logits.softmax(-1).amax(-1, keepdim=True).log()
    own = logits.gather(1, token_ids)
    ranks = (logits >= own).sum(-1)
    if not num_top:
        return token_ids, own - log_mass, ranks
    top_ids = _top_tokens(logits, num_top)
    values = torch.cat([own, logits.gather(1, top_ids)], 1)
    return torch.cat([token_ids, top_ids], 1), values - log_mass, ranks


def _top_tokens(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the largest logits, [R, count], descending; lower ids come first among ties."""
    if logits.device.type != "cpu":
        return _top_by_key(logits, count)
    values, ids = logits.topk(min(count + 1, logits.shape[1]))
    ids = ids[:, :count]
    tied = (values[:, 1:] == values[:, :-1]).any(-1).nonzero()[:, 0]
    if len(tied):
        ids[tied] = _top_by_key(logits[tied], count)
    return ids


def _top_by_key(logits: Tensor, count: int) -> Tensor:
    """Do what `_top_tokens` does, with integers that are never equal and order as (logit, descending id)
    do."""
    last = logits.shape[1] - 1
    bits = (logits + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    reversed_ids = torch.arange(last, -1, -1, device=logits.device)
    keys = (ordered.long() << 32) | reversed_ids
    return last - (keys.topk(count).values & 0xFFFFFFFF)
