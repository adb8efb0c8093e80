"""The parameters of a batch's rows as the sampler needs them: tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.draw_parameters import DRAW_ROW
from nbengine.kernels.transfer import upload
from nbengine.sampling.logits import LogitBias, TokenMask
from nbengine.sampling.logprobs import LogprobRows
from nbengine.sampling.penalties import PenaltyRows
from nbengine.sampling.rows import ALL_ROWS, Rows, rows_of


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of F rows, each of which has at least one; a switched-off filter keeps everything."""

    top_k: Tensor | None
    """int64 [F, 1]; more than the vocabulary where off, None when off in all rows."""
    top_p: Tensor | None
    """float64 [F, 1]; infinity where off, None when off in all rows."""
    log_min_p: Tensor | None
    """float32 [F, 1]; minus infinity where off, None when off in all rows."""
    max_top_k: int
    """The largest `top_k` that is on, 0 when none is."""
    needs_full_mass: bool
    """True when some row has top-p as its only filter: the probability mass of the whole vocabulary
    counts."""

    def select(self, rows: Rows) -> Filters:
        """Return the filters of some of the rows."""
        return Filters(
            top_k=None if self.top_k is None else self.top_k[rows],
            top_p=None if self.top_p is None else self.top_p[rows],
            log_min_p=None if self.log_min_p is None else self.log_min_p[rows],
            max_top_k=self.max_top_k,
            needs_full_mass=self.needs_full_mass,
        )


@dataclass(frozen=True, slots=True)
class RandomRows:
    """The rows that are drawn at random, either all through filters or all without."""

    rows: Rows
    """The indices of R rows of the batch."""
    temperature: Tensor
    """float32 [R, 1]"""
    filters: Filters | None
    draws: NDArray[np.void]
    """The same as `DRAW_ROW`s [R], on the host."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The parameters of a batch's rows, grouped by what has to be computed; empty groups are left out."""

    greedy_rows: Rows | None
    random: tuple[RandomRows, ...]
    draws: NDArray[np.void] | None = None
    """A `DRAW_ROW` for each row, where some are random."""
    allowed: TokenMask | None = None
    """The mask of the rows with `allowed_token_ids`."""
    banned: Tensor | None = None
    """int64, the places in the flattened logits of bad words of a single token."""
    bias: LogitBias | None = None
    penalties: PenaltyRows | None = None
    logprobs: LogprobRows | None = None

    changes_logits: bool = field(init=False)
    """Some row's logits are changed before it is sampled."""

    def __post_init__(self) -> None:
        parts = (self.allowed, self.banned, self.bias, self.penalties)
        object.__setattr__(self, "changes_logits", any(part is not None for part in parts))

    @property
    def asks_more(self) -> bool:
        """Return whether some row asks for more than a token that is drawn from the model's own logits."""
        return self.changes_logits or self.logprobs is not None

    @classmethod
    def build(
        cls,
        temperature: NDArray[np.float32],
        top_k: NDArray[np.int64],
        top_p: NDArray[np.float64],
        min_p: NDArray[np.float32],
        *,
        vocab_size: int,
        device: torch.device,
    ) -> SamplingMetadata:
        """Build the groups from parameter columns, one entry a row.

        Temperature 0 marks a greedy row. Filters are off at top_k 0 or at least `vocab_size`, top_p 1, min_p
        0.
        """
        greedy = temperature == 0
        if greedy.all():
            return cls(greedy_rows=ALL_ROWS, random=())
        has_k = (top_k > 0) & (top_k < vocab_size)
        filtered = ~greedy & (has_k | (top_p < 1) | (min_p > 0))
        draws = _draw_rows(np.where(greedy, np.inf, temperature), np.where(has_k, top_k, 0), top_p, min_p)
        groups = []
        for members, is_filtered in ((~greedy & ~filtered, False), (filtered, True)):
            if not members.any():
                continue
            rows = np.flatnonzero(members)
            filters = None
            if is_filtered:
                filters = _filters(has_k[rows], top_k[rows], top_p[rows], min_p[rows], vocab_size, device)
            groups.append(
                RandomRows(
                    rows=rows_of(rows, len(members), device),
                    temperature=_column(temperature[rows, None], device),
                    filters=filters,
                    draws=draws[rows],
                )
            )
        greedy_rows = _column(np.flatnonzero(greedy), device) if greedy.any() else None
        return cls(greedy_rows, tuple(groups), draws)


def _filters(
    has_k: NDArray[np.bool_],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float32],
    vocab_size: int,
    device: torch.device,
) -> Filters:
    has_p, has_min_p, log_min_p = top_p < 1, min_p > 0, _log(min_p)
    return Filters(
        top_k=_column(np.where(has_k, top_k, vocab_size + 1)[:, None], device) if has_k.any() else None,
        top_p=_column(np.where(has_p, top_p, np.inf)[:, None], device) if has_p.any() else None,
        log_min_p=_column(log_min_p[:, None], device) if has_min_p.any() else None,
        max_top_k=int(top_k[has_k].max(initial=0)),
        needs_full_mass=bool((has_p & ~has_k & ~has_min_p).any()),
    )


def _draw_rows(
    temperature: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float32],
) -> NDArray[np.void]:
    rows = np.zeros(len(temperature), DRAW_ROW)
    rows["inverse"], rows["log_min_p"] = 1 / temperature, _log(min_p)
    rows["top_p"], rows["top_k"] = top_p, top_k
    return rows


def _log(min_p: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the logarithms, minus infinity of 0."""
    result = np.full_like(min_p, -np.inf)
    np.log(min_p, out=result, where=min_p > 0)
    return result


def _column(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return upload(array, device)
