"""Changes to float32 logits that need nothing but an index: masks, bans and biases. All work in place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.sampling.rows import Rows, add_to_rows, pieces, take_rows


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that R rows may get."""

    rows: Rows
    bitmask: Tensor
    """int32 [R, vocabulary / 32 rounded up]; bit i of word w is set where token 32 w + i is allowed."""


@dataclass(frozen=True, slots=True)
class LogitBias:
    """The numbers that are added to single logits."""

    index: Tensor
    """int64 [E], into the flattened logits; all different."""
    bias: Tensor
    """float32 [E]"""


def apply_mask(logits: Tensor, mask: TokenMask) -> None:
    """Set the logits of tokens that the mask leaves out to minus infinity.

    Bytes of the bitmask are looked up in a table of 8 addends (0 or minus infinity) each, which on a CPU
    costs a tenth of a masked fill.

    Args:
        logits: float32 [N, V], without plus infinity in the rows of the mask.
        mask: the mask of some of the rows.
    """
    vocab = logits.shape[1]
    table = _addends(logits.device)
    for rows, members in pieces(mask.rows, logits, bounded=True):
        index = mask.bitmask[members].view(torch.uint8).int()
        addends = F.embedding(index, table).flatten(1)[:, :vocab]
        add_to_rows(logits, rows, addends)


def ban(logits: Tensor, index: Tensor) -> None:
    """Set the logits at `index` (int64 [E], into the flattened logits [N, V]) to minus infinity."""
    logits.view(-1).index_fill_(0, index, -torch.inf)


def add_bias(logits: Tensor, bias: LogitBias) -> None:
    """Add numbers to single logits of [N, V]."""
    logits.view(-1).index_add_(0, bias.index, bias.bias)


def float_copy(logits: Tensor, rows: Rows) -> Tensor:
    """Copy rows of the logits to float32, in new memory."""
    taken = take_rows(logits, rows).float()
    return taken.clone() if taken.data_ptr() == logits.data_ptr() else taken


@cache
def _addends(device: torch.device) -> Tensor:
    bits = torch.arange(256)[:, None] >> torch.arange(8)
    return torch.where(bits & 1 == 1, 0.0, -torch.inf).to(device, torch.float32)
