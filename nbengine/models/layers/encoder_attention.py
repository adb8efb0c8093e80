"""Attention of whole prompts, in both directions and without a cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_MAX_PADDING = 1.25
"""A group may have at most this many times the tokens of its prompts, padding included."""


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """A group of prompts of similar length that lie one behind the other: `count` of them, padded to `length`
    tokens.

    The tensors are None where all prompts have `length` tokens.
    """

    start: int
    stop: int
    count: int
    length: int
    gather: Tensor | None = None
    """int64 [count, length]: each prompt's tokens in the flat batch; for padding, its last token."""
    mask: Tensor | None = None
    """bool [count, 1, 1, length]: True for the prompt's own tokens."""
    scatter: Tensor | None = None
    """int64 [stop - start]: the places of the tokens in the padded group, flattened."""


def group_prompts(lengths: NDArray[np.int64], device: torch.device) -> list[PromptGroup]:
    """Divide a flat batch of prompts, in ascending order of length, into groups with little padding."""
    starts = np.concatenate(([0], np.cumsum(lengths)))
    groups = []
    first = 0
    for last in range(len(lengths)):
        following = last + 1
        if following < len(lengths):
            num_tokens = starts[following + 1] - starts[first]
            if lengths[following] * (following + 1 - first) <= _MAX_PADDING * num_tokens:
                continue
        groups.append(_group(starts[first : following + 1], lengths[first:following], device))
        first = following
    return groups


def _group(starts: NDArray[np.int64], lengths: NDArray[np.int64], device: torch.device) -> PromptGroup:
    count, length = len(lengths), int(lengths[-1])
    begin, end = int(starts[0]), int(starts[-1])
    if lengths[0] == length:
        return PromptGroup(begin, end, count, length)
    columns = np.arange(length)
    own = columns < lengths[:, None]
    gather = starts[:-1, None] + np.minimum(columns, lengths[:, None] - 1)
    return PromptGroup(
        begin,
        end,
        count,
        length,
        torch.from_numpy(gather).to(device),
        torch.from_numpy(own[:, None, None]).to(device),
        torch.from_numpy(np.flatnonzero(own)).to(device),
    )


def bidirectional_attention(query_key_value: Tensor, groups: list[PromptGroup]) -> Tensor:
    """Let every token attend to all tokens of its prompt.

    `query_key_value` has shape [T, 3, num_heads, head_dim]; the result is [T, num_heads * head_dim].
    """
    num_tokens, _, num_heads, head_dim = query_key_value.shape
    out = query_key_value.new_empty(num_tokens, num_heads * head_dim)
    for group in groups:
        if group.gather is None:
            own = query_key_value[group.start : group.stop]
            padded = own.view(group.count, group.length, 3, num_heads, head_dim)
        else:
            padded = query_key_value[group.gather]
        query, key, value = padded.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=group.mask)
        rows = attended.transpose(1, 2).reshape(-1, num_heads * head_dim)
        out[group.start : group.stop] = rows if group.scatter is None else rows[group.scatter]
    return out
