"""A logits processor that plants what no model should compute, where a request asks for it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nbengine.config import EngineConfig
from nbengine.sampling.logits_processor import BatchUpdate, LogitsProcessor, RowAdded, RowMoved, RowRemoved

PLANTER = f"{__name__}:Planter"


class Planter(LogitsProcessor):
    """`extra_args={"plant": [n, kind]}` spoils the logits of a request's output token n, counted from 0.

    The kind "nan" is one NaN among numbers, "inf" one infinity, and "nothing" minus infinity alone.
    """

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        self._num_output: dict[int, int] = {}
        self._plants: dict[int, tuple[int, str] | None] = {}

    def update_state(self, update: BatchUpdate) -> None:
        for row in update.sampled_rows.tolist():
            self._num_output[row] += 1
        for change in update.changes:
            match change:
                case RowAdded(row, params, _, output):
                    self._num_output[row] = len(output)
                    self._plants[row] = (params.extra_args or {}).get("plant")
                case RowRemoved(row):
                    del self._num_output[row], self._plants[row]
                case RowMoved(source, target):
                    self._num_output[target] = self._num_output.pop(source)
                    self._plants[target] = self._plants.pop(source)

    def apply(self, logits: Tensor, rows: np.ndarray) -> Tensor:
        for position, row in enumerate(rows.tolist()):
            plant = self._plants[row]
            if plant is not None and plant[0] == self._num_output[row]:
                spoil(logits[position], plant[1])
        return logits


def spoil(logits: Tensor, kind: str) -> None:
    """Plant something in the logits of one row."""
    if kind == "nothing":
        logits.fill_(-torch.inf)
    else:
        logits[-3] = float(kind)
