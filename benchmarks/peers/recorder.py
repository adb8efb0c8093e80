"""A logits processor that writes down the logits of requests, and makes them go on with given tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.sampling.logits_processor import BatchUpdate, LogitsProcessor, RowAdded, RowMoved, RowRemoved


@dataclass(slots=True)
class _Record:
    path: str
    tokens: list[int]
    """The token that is to follow each position."""
    rows: list[NDArray[np.float32]]


class Recorder(LogitsProcessor):
    """A request says with `extra_args` where its logits go ("record") and its tokens ("tokens"); the file has
    float32 [len(tokens), vocabulary] when its last token is sampled."""

    def __init__(self, config: Any, device: Any) -> None:
        self._records: dict[int, _Record] = {}

    def update_state(self, update: BatchUpdate) -> None:
        """Follow the requests through the rows."""
        for change in update.changes:
            if isinstance(change, RowAdded):
                extra = change.params.extra_args
                if len(change.output_token_ids):
                    raise RuntimeError("a request was preempted: give the engine more blocks")
                self._records[change.row] = _Record(extra["record"], extra["tokens"], [])
            elif isinstance(change, RowMoved):
                self._records[change.target] = self._records.pop(change.source)
            elif isinstance(change, RowRemoved):
                self._records.pop(change.row, None)

    def apply(self, logits: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """Write down the logits, and leave only the token that follows."""
        for place, row in enumerate(rows.tolist()):
            record = self._records[row]
            token = record.tokens[len(record.rows)]
            record.rows.append(logits[place].numpy().copy())
            logits[place] = -torch.inf
            logits[place, token] = 0
            if len(record.rows) == len(record.tokens):
                np.save(record.path, np.stack(record.rows))
        return logits
