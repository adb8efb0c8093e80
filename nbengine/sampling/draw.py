"""This module draws tokens: one uniform number a row, inverted through the row's cumulative distribution.

Whatever the path, a row's result depends on its own logits, parameters and uniform number alone. A row that
has NaN or infinity, or minus infinity alone, gives some token, and beside it a number that is not finite.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nbengine.sampling.metadata import Filters

_CHUNK = 256
_WINDOW = 1024
_BELOW_ONE = 1 - 2.0**-52


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from softmax(logits), walking the vocabulary in order.

    The cumulative sum is taken over chunks first and then inside the chunk that is hit, which reads the
    probabilities once.

    Args:
        logits: float32 [R, V].
        uniform: float64 [R], in [0, 1).

    Returns:
        The tokens, int64 [R], and the sum of each row's probabilities, float64 [R], which is NaN where there
        are none.
    """
    probs = logits.softmax(-1)
    rows, vocab = probs.shape
    whole = vocab - vocab % _CHUNK
    masses = probs[:, :whole].view(rows, -1, _CHUNK).sum(-1)
    if whole < vocab:
        masses = torch.cat([masses, probs[:, whole:].sum(-1, keepdim=True)], -1)
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = uniform[:, None] * total
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, chunk)
    fraction = (target - cumulative.gather(1, chunk) + mass) / mass

    ids = chunk * _CHUNK + torch.arange(_CHUNK, device=probs.device)
    inside = probs.gather(1, ids.clamp(max=vocab - 1)).masked_fill_(ids >= vocab, 0)
    cumulative = inside.cumsum(-1, dtype=torch.float64)
    target = fraction.clamp_(0, _BELOW_ONE) * cumulative[:, -1:]
    offset = torch.searchsorted(cumulative, target, right=True)
    tokens = (chunk * _CHUNK + offset).clamp_(max=vocab - 1).squeeze(1)
    return tokens, total[:, 0]


def draw_filtered(logits: Tensor, uniform: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Draw after min-p and top-k/top-p, walking the kept tokens from the most to the least likely.

    Each filter alone is that of transformers' logits warpers: min-p keeps tokens at least `min_p` times as
    likely as the likeliest; top-k keeps the k largest logits and all ties with the k-th; top-p then keeps the
    fewest tokens whose share of the remaining mass reaches `top_p`, lower token ids first among ties.

    Args:
        logits: float32 [F, V], already divided by the temperature.
        uniform: float64 [F], in [0, 1).
        filters: parameters of these rows.

    Returns:
        The tokens, int64 [F], and the largest logit of each row, float32 [F], where NaN counts as larger than
        any number.
    """
    if logits.device.type == "cpu":
        return _draw_from_window(logits, uniform, filters)
    return _draw_from_sorted(logits, uniform, filters)


def _draw_from_sorted(logits: Tensor, uniform: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Sort everything: on a GPU that costs less than a synchronisation to see whether a window is enough."""
    values, ids = torch.sort(logits, stable=True, dim=-1, descending=True)
    rank, _ = _draw_rank(values, _full_mass(logits, filters), uniform, filters)
    return ids.gather(1, rank).squeeze(1), values[:, 0]


def _draw_from_window(logits: Tensor, uniform: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """Sort a window of the largest logits, and everything for the rows that keep more (CPU)."""
    vocab = logits.shape[1]
    window = min(vocab, max(_WINDOW, 2 * filters.max_top_k))
    values = _largest(logits, window)
    peak = values[:, 0]
    mass = _full_mass(logits, filters)
    rank, too_few = _draw_rank(values, mass, uniform, filters)
    tokens = _token_of_rank(logits, values, rank)
    redo = too_few.nonzero()[:, 0]
    if window < vocab and redo.numel():
        values = _largest(logits[redo], vocab)
        mass = None if mass is None else mass[redo]
        rank, _ = _draw_rank(values, mass, uniform[redo], filters.select(redo))
        tokens[redo] = _token_of_rank(logits[redo], values, rank)
    return tokens, peak


def _draw_rank(
    values: Tensor, full_mass: Tensor | None, uniform: Tensor, filters: Filters
) -> tuple[Tensor, Tensor]:
    """Draw ranks from the K largest logits of each row, `values` [F, K] descending.

    Returns:
        The ranks (int64 [F, 1]), and which rows (bool [F]) cannot be drawn from K values alone, so that their
        ranks do not count; with K the size of the vocabulary that has no meaning.
    """
    threshold = _threshold(values, filters)
    weights = (values - values[:, :1]).exp_().masked_fill_(values < threshold, 0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    kept = weights > 0
    too_few = kept[:, -1]
    if filters.top_p is not None:
        mass = cumulative[:, -1:]
        unlimited = threshold == -torch.inf
        if full_mass is not None:
            mass = torch.where(unlimited, full_mass, mass)
        kept = kept & (cumulative - weights < filters.top_p * mass)
        too_few = torch.where(unlimited[:, 0], kept[:, -1], too_few)
    last = (kept.sum(-1, keepdim=True) - 1).clamp_(min=0)
    target = uniform[:, None] * cumulative.gather(1, last)
    rank = torch.searchsorted(cumulative, target, right=True)
    return torch.minimum(rank, last), too_few


def _threshold(values: Tensor, filters: Filters) -> Tensor:
    """Return the smallest logit that min-p and top-k keep, [F, 1]; minus infinity where both are off."""
    peak = values[:, :1]
    threshold = torch.full_like(peak, -torch.inf) if filters.log_min_p is None else peak + filters.log_min_p
    if filters.top_k is not None:
        window = values.shape[1]
        kth = values.gather(1, filters.top_k.clamp(max=window) - 1)
        threshold = torch.maximum(threshold, kth.masked_fill_(filters.top_k > window, -torch.inf))
    return threshold


def _full_mass(logits: Tensor, filters: Filters) -> Tensor | None:
    """Return the sum of exp(logit - largest logit) over the vocabulary, [F, 1] float64, where top-p needs
    it."""
    if not filters.needs_full_mass:
        return None
    return logits.softmax(-1).amax(-1, keepdim=True).double().reciprocal_()


def _largest(logits: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of each row in descending order (CPU; numpy sorts with SIMD)."""
    array = logits.numpy()
    if count < array.shape[1]:
        array = np.partition(array, -count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def _token_of_rank(logits: Tensor, values: Tensor, rank: Tensor) -> Tensor:
    """Return the token ids (int64 [F]) at `rank` in the descending `values`, lower ids first among ties
    (CPU)."""
    value = values.gather(1, rank)
    matches = (logits == value).numpy()
    nth = (rank - (values > value).sum(-1, keepdim=True)).numpy()[:, 0]
    tokens = matches.argmax(-1)
    tied = np.flatnonzero(nth)
    if tied.size:
        tokens[tied] = (matches[tied].cumsum(-1) == nth[tied, None] + 1).argmax(-1)
    return torch.from_numpy(tokens)
