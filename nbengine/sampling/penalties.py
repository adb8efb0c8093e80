"""Presence, frequency and repetition penalties, over the tokens that occurred instead of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.dispatch import select_penalties
from nbengine.kernels.transfer import upload
from nbengine.sampling.rows import Rows, rows_of, take_rows
from nbengine.sampling_params import SamplingParams

_GRAIN = 16
"""Columns are brought into use this many at a time."""
_ENTRY_BYTES = 8 + 3 * 4
_PIECE_BYTES = 64 << 20
"""On a device a step works on this many bytes of the longest column at once, which bounds its temporaries."""


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The rows of a batch that have penalties: R of them."""

    table: PenaltyTable
    host_rows: NDArray[np.int64]
    """The rows' indices in the table."""
    rows: Rows
    """The same indices, on the device."""
    index: Tensor
    """The same indices, as int64 [R]."""
    positions: Rows
    """The rows' indices in the logits."""
    shift: Tensor
    """int64 [R, 1], the distance from where a row's logits would be, if the table's rows were those of the
    logits, to where they are."""

    @classmethod
    def build(
        cls,
        table: PenaltyTable,
        host_rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        num_positions: int,
        device: torch.device,
    ) -> PenaltyRows:
        """Build the object for rows of the table, whose logits are at `positions` of `num_positions`."""
        count = len(host_rows)
        index = upload(host_rows, device)
        in_order = bool((host_rows == np.arange(count)).all())
        shift = (positions - host_rows)[:, None] * table.vocab_size
        return cls(
            table=table,
            host_rows=host_rows,
            rows=slice(0, count) if in_order else index,
            index=index,
            positions=rows_of(positions, num_positions, device),
            shift=upload(shift, device),
        )


def table_bytes(max_num_rows: int, vocab_size: int, max_num_tokens: int) -> int:
    """Return the bytes of a `PenaltyTable` that has all columns that it may need."""
    return max_num_rows * _max_width(vocab_size, max_num_tokens) * _ENTRY_BYTES


class PenaltyTable:
    """For each row, a list of the different tokens that occurred, and how each one's logit is to be changed.

    A step then reads and writes some hundred logits a row. Everything lies on the device and follows the
    sampled tokens there, without waiting for them.

    On a CPU compiled kernels do a step's work. Elsewhere torch does it on all columns in use, whatever the
    lists' lengths. For that the lists are padded with copies of their first entry, so that it does not matter
    which of them is written last; an empty list is padded with token 0 and no change. Only the first `_width`
    columns are in use; the last of them is padding in every row, from which more columns can be made.
    """

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        max_num_tokens: int | None = None,
        checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        """Make an empty table; `max_num_tokens` is the most tokens of a row, None if that is not known.

        `checkpoint` is called before anything changes for which memory had to be found; what it raises keeps
        the table as it is. With it the tables of several ranks stay alike.
        """
        self._checkpoint = checkpoint
        self.vocab_size = vocab_size
        self._max_width = _max_width(vocab_size, vocab_size if max_num_tokens is None else max_num_tokens)
        self._device = device
        self._width = 1
        self._rows: set[int] = set()
        self._num_entries = np.zeros(max_num_rows, np.int64)
        """An upper bound of each list's length: only the device knows whether a sampled token was in the list
        already."""
        self._parameters = torch.zeros(max_num_rows, 3, dtype=torch.float32, device=device)
        """Repetition, frequency and presence penalty."""
        self._lengths = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._starts = torch.arange(max_num_rows, device=device) * vocab_size
        self._index = self._starts[:, None].clone()
        """Each token's place in the flattened logits."""
        self._counts = torch.zeros(max_num_rows, 1, dtype=torch.float32, device=device)
        """The number of times that each token was generated."""
        self._factors = torch.ones(max_num_rows, 1, dtype=torch.float32, device=device)
        """The factors that multiply negative logits and divide positive ones."""
        self._deductions = torch.zeros(max_num_rows, 1, dtype=torch.float32, device=device)
        """The numbers that are then subtracted."""

    def __len__(self) -> int:
        """Count the rows that have been added and not removed."""
        return len(self._rows)

    @property
    def longest_row(self) -> int:
        """Return the row that has the longest list, as far as is known without waiting for the device."""
        return int(self._num_entries.argmax())

    def add(
        self,
        row: int,
        params: SamplingParams,
        prompt_token_ids: NDArray[np.int32],
        output_token_ids: NDArray[np.int32],
    ) -> None:
        """Fill a row; `prompt_token_ids` is empty where the prompt's tokens are not known.

        Raises:
            RuntimeError: there is not enough memory; the row is not there then.
        """
        self._rows.add(row)
        try:
            penalised = output_token_ids
            if params.repetition_penalty != 1:
                penalised = np.concatenate([prompt_token_ids, output_token_ids])
            token_ids = np.unique(penalised).astype(np.int64)
            counts = np.zeros(len(token_ids), np.float32)
            generated, times = np.unique(output_token_ids, return_counts=True)
            counts[np.searchsorted(token_ids, generated)] = times
            self._num_entries[row] = len(token_ids)
            self._fit_width()
            parameters = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            self._parameters[row] = torch.tensor(parameters, dtype=torch.float32, device=self._device)
            self._fill(row, token_ids, counts)
        except BaseException:
            self.remove(row)
            raise

    def remove(self, row: int) -> None:
        """Forget a row, if it is there."""
        if row in self._rows:
            self._rows.remove(row)
            self._num_entries[row] = 0
            self._use(min(self._wanted_width(), self._index.shape[1]))

    def move(self, source: int, target: int) -> None:
        """Let row `target`, which is not in the table, take over from `source`, if that is there."""
        if source not in self._rows:
            return
        self._rows.add(target)
        self._num_entries[target] = self._num_entries[source]
        for array in (*self._lists(), self._lengths, self._parameters):
            array[target] = array[source]
        self._index[target] += (target - source) * self.vocab_size
        self.remove(source)

    def apply(self, logits: Tensor, rows: PenaltyRows) -> None:
        """Penalise the logits (float32 [N, V]) in place.

        With c the number of times that a token was generated, a logit x becomes x / r where it is positive
        and x * r where not, if the token is in prompt or output (r: `repetition_penalty`, Keskar et al.,
        CTRL: A Conditional Transformer Language Model for Controllable Generation, 2019), and then x - c *
        `frequency_penalty` - (c > 0) * `presence_penalty` (OpenAI's definition).
        """
        flat = logits.view(-1)
        if (compiled := select_penalties(self._device)) is not None:
            compiled.apply(**self._arguments(rows), logits=flat.data_ptr())
            return
        for some, members in self._pieces(rows):
            index, _, factors, deductions = (
                take_rows(part[:, : self._width], some) for part in self._lists()
            )
            index = index + rows.shift[members]
            x = flat.take(index)
            changed = x.clamp(min=0).div_(factors)
            changed.add_(x.clamp_(max=0).mul_(factors)).sub_(deductions)
            flat.put_(index, changed)

    def expect(self, rows: PenaltyRows) -> None:
        """Count one more token in each of `rows`; to be called before each `append`."""
        self._num_entries[rows.host_rows] += 1

    @property
    def is_full(self) -> bool:
        """Return whether there is no room for the tokens that are expected."""
        return bool(self._num_entries.max() >= self._width)

    def make_room(self, rows: PenaltyRows) -> None:
        """Make room for the tokens that are expected in `rows`, if there is none; waits for the device then.

        Raises:
            RuntimeError: there is not enough memory; the table still has room for what is in it.
        """
        if self.is_full:
            self._tighten(rows)
            self._fit_width()

    def append(self, rows: PenaltyRows, token_ids: Tensor) -> None:
        """Take in the tokens that were sampled for `rows`: int64 [R], on the device. They must have been
        expected, and there must be room for them."""
        lengths, starts = take_rows(self._lengths, rows.rows), take_rows(self._starts, rows.rows)
        place = token_ids + starts
        if (compiled := select_penalties(self._device)) is not None:
            compiled.append(**self._arguments(rows), places=place.data_ptr())
            return
        for some, members in self._pieces(rows):
            self._append_some(some, rows.index[members], place[members], lengths[members])

    def _append_some(self, rows: Rows, index: Tensor, place: Tensor, lengths: Tensor) -> None:
        """Do what `append` does without a compiled kernel, for some of the rows; each argument has their
        part."""
        matches = take_rows(self._index[:, : self._width], rows) == place[:, None]
        column = matches.view(torch.uint8).argmax(-1)
        # A match in the padding is the first one only where the list is empty.
        is_new = (self._index[index, column] != place).logical_or_(column >= lengths)
        column = torch.where(is_new, lengths, column)
        where = index, column
        counts = self._counts[where].masked_fill_(is_new, 0).add_(1)
        repetition, frequency, presence = take_rows(self._parameters, rows).unbind(1)
        self._index[where] = place
        self._counts[where] = counts
        self._factors[where] = repetition
        self._deductions[where] = (counts * frequency).add_(presence)
        self._lengths[index] = lengths + is_new
        # All lists are padded: finding those whose first entry has changed would mean waiting for the device.
        self._pad(index)

    def _pieces(self, rows: PenaltyRows) -> Iterator[tuple[Rows, slice]]:
        """Yield the rows of the table in pieces, each with its place among `rows`."""
        count, size = len(rows.host_rows), max(1, _PIECE_BYTES // (8 * self._width))
        if count <= size:
            yield rows.rows, slice(0, count)
            return
        for start in range(0, count, size):
            members = slice(start, start + size)
            yield rows.index[members], members

    def _arguments(self, rows: PenaltyRows) -> dict[str, int]:
        return {
            "count": len(rows.host_rows),
            "rows": rows.index.data_ptr(),
            "shifts": rows.shift.data_ptr(),
            "stride": self._index.shape[1],
            "lengths": self._lengths.data_ptr(),
            "parameters": self._parameters.data_ptr(),
            "index": self._index.data_ptr(),
            "counts": self._counts.data_ptr(),
            "factors": self._factors.data_ptr(),
            "deductions": self._deductions.data_ptr(),
        }

    def _lists(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._index, self._counts, self._factors, self._deductions

    def _fill(self, row: int, token_ids: NDArray[np.int64], counts: NDArray[np.float32]) -> None:
        count = len(token_ids)
        repetition, frequency, presence = self._parameters[row]
        self._lengths[row] = count
        self._index[row], self._counts[row] = self._starts[row], 0
        self._factors[row], self._deductions[row] = repetition if count else 1, 0
        self._index[row, :count] += upload(token_ids, self._device)
        self._counts[row, :count] = upload(counts, self._device)
        generated = self._counts[row, :count]
        self._deductions[row, :count] = generated * frequency + (generated > 0) * presence
        for part in self._lists() if count else ():
            part[row, count:] = part[row, 0]

    def _pad(self, rows: Tensor) -> None:
        """Copy the first entry of lists over their padding."""
        columns = torch.arange(self._width, device=self._device)
        is_padding = columns >= self._lengths[rows, None]
        for part in self._lists():
            used = part[:, : self._width]
            taken = used.index_select(0, rows)
            used.index_copy_(0, rows, torch.where(is_padding, taken[:, :1], taken))

    def _tighten(self, rows: PenaltyRows) -> None:
        """Replace upper bounds by the lengths themselves and the token to come; waits for the device."""
        lengths = take_rows(self._lengths, rows.rows).cpu().numpy() + 1
        self._checkpoint()
        self._num_entries[rows.host_rows] = lengths

    def _fit_width(self) -> None:
        """Bring as many columns into use as the longest list needs now and for some tokens more."""
        longest, capacity = int(self._num_entries.max()), self._index.shape[1]
        width = self._wanted_width()
        if width > capacity > longest:
            width = capacity
        elif width > capacity:
            # A CPU's table grows with its lists. On a device, whose memory was divided at the start, it gets
            # its full width at once: to grow it would need the old and the new table at the same time.
            wanted = max(width, capacity * 5 // 4) if self._device.type == "cpu" else self._max_width
            extra = min(wanted, self._max_width) - capacity
            # All of them are replaced or none: should memory run out, the lists stay as they are.
            wider = [F.pad(part, (0, extra)) for part in self._lists()]
            self._checkpoint()
            self._index, self._counts, self._factors, self._deductions = wider
        self._use(width)

    def _wanted_width(self) -> int:
        return min(_width_for(int(self._num_entries.max())), self._max_width)

    def _use(self, width: int) -> None:
        """Bring the first `width` columns into use, which are there."""
        if width > self._width:
            for part in self._lists():
                part[:, self._width : width] = part[:, self._width - 1 : self._width]
        self._width = width


def _max_width(vocab_size: int, max_num_tokens: int) -> int:
    return _width_for(min(vocab_size, max_num_tokens) + 1)


def _width_for(num_entries: int) -> int:
    """Return the number of columns for lists of up to `num_entries`, with some for tokens to come and the
    padding."""
    return (num_entries // _GRAIN + 2) * _GRAIN
