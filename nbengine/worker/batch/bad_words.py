"""Bad words of more than one token: the last token is banned where the others have just been generated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nbengine.worker.batch.row_table import RowTable

_ANY = -1
"""This stands in a prefix before its first token."""


class BadWords:
    """The bad words of all rows of a batch. The prompt does not count: a word begins in the output."""

    def __init__(self) -> None:
        self._table = RowTable(_dtype(1))

    def __len__(self) -> int:
        return len(self._table)

    def add(self, row: int, words: Sequence[Sequence[int]]) -> None:
        """Add a row's words, as token ids, of two tokens at least."""
        width = self._table.entries["prefix"].shape[1]
        longest = max(len(word) for word in words) - 1
        if longest > width:
            self._widen(longest - width)
            width = longest
        prefixes = np.full((len(words), width), _ANY)
        for index, word in enumerate(words):
            prefixes[index, width + 1 - len(word) :] = word[:-1]
        self._table.add(
            row,
            prefix=prefixes,
            length=np.array([len(word) - 1 for word in words]),
            last=np.array([word[-1] for word in words]),
        )

    def remove(self, row: int) -> None:
        """Drop a row's words."""
        self._table.remove(row)

    def move(self, source: int, target: int) -> None:
        """Give a row's words to another, which has none."""
        self._table.move(source, target)

    def banned(
        self,
        token_ids: NDArray[np.int32],
        num_tokens: NDArray[np.int64],
        num_prompt_tokens: NDArray[np.int64],
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the tokens that would complete a word, as (rows, token ids).

        Args:
            token_ids: [rows of the batch, max length], prompt and output.
            num_tokens: by row, the number of its tokens.
            num_prompt_tokens: by row, the number of its prompt's tokens.
        """
        rows, entries = self._table.rows, self._table.entries
        prefixes = entries["prefix"]
        ends = num_tokens[rows]
        columns = ends[:, None] + np.arange(-prefixes.shape[1], 0)
        recent = token_ids[rows[:, None], np.maximum(columns, 0)]
        matches = ((recent == prefixes) | (prefixes == _ANY)).all(1)
        matches &= ends - num_prompt_tokens[rows] >= entries["length"]
        return rows[matches], entries["last"][matches]

    def _widen(self, extra: int) -> None:
        old = self._table.entries
        width = old["prefix"].shape[1] + extra
        self._table.entries = np.empty(len(old), _dtype(width))
        for name in ("length", "last"):
            self._table.entries[name] = old[name]
        self._table.entries["prefix"] = np.pad(old["prefix"], ((0, 0), (extra, 0)), constant_values=_ANY)


def _dtype(width: int) -> np.dtype[np.void]:
    return np.dtype([("prefix", np.int32, (width,)), ("length", np.int64), ("last", np.int64)])
