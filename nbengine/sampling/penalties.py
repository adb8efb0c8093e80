"""Presence, frequency and repetition penalties, over the tokens that occurred instead of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nbengine.sampling.rows import Rows, add_to_rows, rows_of, take_rows
from nbengine.sampling_params import SamplingParams

_GRAIN = 32
"""Columns are brought into use by so many at once."""


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Rows of a batch that have penalties: R of them."""

    table: PenaltyTable
    host_rows: NDArray[np.int64]
    """Their rows in the table."""
    rows: Rows
    """The same, on the device."""
    index: Tensor
    """The same, as int64 [R]."""
    positions: Rows
    """Their rows in the logits."""
    offsets: Tensor
    """int64 [R, 1]: where those begin in the flattened logits."""
    repetition: bool
    """Some row has a repetition penalty."""
    occurrence: bool
    """Some row has a presence or a frequency penalty."""

    @classmethod
    def build(
        cls,
        table: PenaltyTable,
        host_rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        num_positions: int,
        *,
        vocab_size: int,
        repetition: bool,
        occurrence: bool,
        device: torch.device,
    ) -> PenaltyRows:
        """Build for rows of the table, whose logits are at `positions` of `num_positions`."""
        count = len(host_rows)
        index = torch.from_numpy(host_rows).to(device)
        in_order = bool((host_rows == np.arange(count)).all())
        return cls(
            table=table,
            host_rows=host_rows,
            rows=slice(0, count) if in_order else index,
            index=index,
            positions=rows_of(positions, num_positions, device),
            offsets=torch.from_numpy(positions * vocab_size).to(device)[:, None],
            repetition=repetition,
            occurrence=occurrence,
        )


class PenaltyTable:
    """For each row, a list of the different tokens that occurred and how often they were generated.

    A step then reads and writes some hundred logits a row. Everything lies on the device and follows the
    sampled tokens there, without waiting for them.

    The lists are padded with copies of one of their own entries, which always have the same values, so that
    it does not matter which is written last; an empty list is padded with token 0, not penalised until it
    occurs. Only the first `_width` columns are in use; the last of them is such a copy in every row, from which
    more columns can be made. The array's last column takes writes that are not wanted.
    """

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        self._device = device
        self._width = 1
        self._rows: set[int] = set()
        self._num_entries = np.zeros(max_num_rows, np.int64)
        """An upper bound: the device alone knows whether a sampled token was in the list already."""
        self._unknown_prompts = False
        parameters = torch.zeros(3, max_num_rows, 1, device=device)
        self._repetition, self._frequency, self._presence = parameters.unbind()
        self._lengths = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._token_ids = torch.zeros(max_num_rows, 2, dtype=torch.int64, device=device)
        self._counts = torch.zeros(max_num_rows, 2, device=device)
        self._factors = torch.ones(max_num_rows, 2, device=device)

    def __len__(self) -> int:
        """Number of rows that have been added and not removed."""
        return len(self._rows)

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: NDArray[np.int32],
        output_token_ids: NDArray[np.int32],
    ) -> None:
        """Fill a row; `prompt_token_ids` is empty where the prompt's tokens are not known."""
        penalised = output_token_ids
        if params.repetition_penalty != 1:
            penalised = np.concatenate([prompt_token_ids, output_token_ids])
            self._unknown_prompts |= not len(prompt_token_ids)
        token_ids = np.unique(penalised).astype(np.int64)
        counts = np.zeros(len(token_ids), np.float32)
        generated, times = np.unique(output_token_ids, return_counts=True)
        counts[np.searchsorted(token_ids, generated)] = times
        self._rows.add(row)
        self._num_entries[row] = len(token_ids)
        self._fit_width()
        self._fill(row, token_ids, counts, params.repetition_penalty)
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty

    def remove(self, row: int) -> None:
        """Forget a row, if it is there."""
        if row in self._rows:
            self._rows.remove(row)
            self._num_entries[row] = 0
            self._fit_width()

    def move(self, source: int, target: int) -> None:
        """Let row `target`, which is not there, take over from `source`, if that is there."""
        if source not in self._rows:
            return
        self._rows.add(target)
        for array in (*self._lists(), self._lengths, self._repetition, self._frequency, self._presence):
            array[target] = array[source]
        self._num_entries[target] = self._num_entries[source]
        self.remove(source)

    def apply(self, logits: Tensor, rows: PenaltyRows) -> None:
        """Penalise the logits (float32 [N, V]) in place.

        With c the number of times that a token was generated, a logit x becomes x / r where it is positive and
        x * r where not, if the token is in prompt or output (r: `repetition_penalty`, Keskar et al., CTRL: A
        Conditional Transformer Language Model for Controllable Generation, 2019), and then
        x - c * `frequency_penalty` - (c > 0) * `presence_penalty` (OpenAI's definition).
        """
        token_ids, counts, factors = (take_rows(part[:, : self._width], rows.rows) for part in self._lists())
        flat = logits.view(-1)
        index = token_ids + rows.offsets
        x = flat.take(index)
        if rows.repetition:
            x = x.clamp(min=0).div_(factors).add_(x.clamp(max=0).mul_(factors))
        if rows.occurrence:
            x.sub_(counts * take_rows(self._frequency, rows.rows))
            x.sub_(counts.clamp(max=1).mul_(take_rows(self._presence, rows.rows)))
        flat.put_(index, x)

    def append(self, rows: PenaltyRows, token_ids: Tensor) -> None:
        """Take in the tokens that were sampled for `rows`: int64 [R], on the device."""
        self._num_entries[rows.host_rows] += 1
        if self._num_entries[rows.host_rows].max() >= self._width:
            self._tighten(rows)
            self._fit_width()
        known, counts, factors = (part[:, : self._width] for part in self._lists())
        repetition = take_rows(self._repetition, rows.rows)
        hits = take_rows(known, rows.rows) == token_ids[:, None]
        add_to_rows(counts, rows.rows, hits.float())
        if self._unknown_prompts:
            hit_factors = torch.where(hits, repetition, take_rows(factors, rows.rows))
            factors.index_copy_(0, rows.index, hit_factors)
        is_new = ~hits.any(1)
        lengths = take_rows(self._lengths, rows.rows)
        column = torch.where(is_new, lengths, self._token_ids.shape[1] - 1)
        self._token_ids[rows.index, column] = token_ids
        self._counts[rows.index, column] = 1
        self._factors[rows.index, column] = repetition[:, 0]
        add_to_rows(self._lengths, rows.rows, is_new.long())

    def _lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._token_ids, self._counts, self._factors

    def _fill(
        self, row: int, token_ids: NDArray[np.int64], counts: NDArray[np.float32], repetition_penalty: float
    ) -> None:
        count = len(token_ids)
        self._lengths[row] = count
        if not count:
            self._token_ids[row], self._counts[row], self._factors[row] = 0, 0, 1
            return
        self._token_ids[row], self._counts[row] = int(token_ids[0]), float(counts[0])
        self._token_ids[row, :count] = torch.from_numpy(token_ids).to(self._device)
        self._counts[row, :count] = torch.from_numpy(counts).to(self._device)
        self._factors[row] = repetition_penalty

    def _tighten(self, rows: PenaltyRows) -> None:
        """Replace upper bounds by the lengths themselves and the token to come; waits for the device."""
        self._num_entries[rows.host_rows] = take_rows(self._lengths, rows.rows).cpu().numpy() + 1

    def _fit_width(self) -> None:
        """Bring as many columns into use as the longest list and its padding need."""
        width = -(-(int(self._num_entries.max()) + 1) // _GRAIN) * _GRAIN
        capacity = self._token_ids.shape[1] - 1
        if width > capacity:
            extra = max(width, capacity * 5 // 4) - capacity
            self._token_ids, self._counts, self._factors = (F.pad(part, (0, extra)) for part in self._lists())
        if width > self._width:
            for part in self._lists():
                part[:, self._width : width] = part[:, self._width - 1 : self._width]
        self._width = width
