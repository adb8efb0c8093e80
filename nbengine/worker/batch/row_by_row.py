"""Sampling where there is too little memory for all rows at once: each is sampled alone, so that only those
end that are too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.models.step_output import StepOutput
from nbengine.sampling.logits import TokenMask
from nbengine.sampling.logprobs import LogprobRows, LogprobsTensors
from nbengine.sampling.sampler import Sampler, SamplerOutput
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.sampling_batch import SamplingBatch


class StepLogits:
    """The logits of the requests that get a token, [requests, vocabulary], computed from their hidden states.

    Sampling may overwrite them. Should it have to begin again, `again` computes them again, in the same batch
    and therefore with the same bits.
    """

    def __init__(
        self, compute: Callable[[Tensor], Tensor], output: StepOutput, index: Tensor | None, count: int
    ) -> None:
        """Take the rows `index` (None: all) of a step's output; there may be padding after the `count` that
        matter."""
        self._compute = compute
        self._hidden = output.hidden if index is None else output.hidden[index]
        self._count = count
        self.largest: tuple[Tensor, Tensor] | None = None
        """The place of each row's largest logit, and that logit, where they are known."""
        self._logits: Tensor | None = None
        if output.logits is None or index is not None:
            self._logits = self._computed()
        else:
            self._logits = output.logits
            self.largest = output.largest

    def take(self) -> Tensor:
        """Return the logits, once, and keep no reference, so that the caller can free them."""
        logits, self._logits = self._logits, None
        if logits is None:
            raise NBEngineError("the logits have been taken")
        return logits

    def again(self) -> Tensor:
        """Compute the logits again, together with the other ranks, whether they have been taken or not."""
        self._logits = None
        return self._computed()

    def _computed(self) -> Tensor:
        return self._compute(self._hidden)[: self._count]


class RowByRow:
    """The sampling of one step, a row at a time. The outcome of a row does not depend on those around it."""

    def __init__(
        self,
        sampler: Sampler,
        batch: SamplingBatch,
        allocations: Allocations,
        grammar_mask: Callable[[NDArray[np.int64]], TokenMask | None],
    ) -> None:
        """Keep what sampling needs; `grammar_mask` gives the mask of some rows of the batch."""
        self._sampler = sampler
        self._batch = batch
        self._allocations = allocations
        self._grammar_mask = grammar_mask

    def sample(
        self, logits: Tensor, rows: NDArray[np.int64], uniform: Tensor | None
    ) -> tuple[SamplerOutput, list[int]]:
        """Sample `rows` of the batch; the arguments are those of `Sampler`.

        Returns:
            The outcome of all, and the rows for which there was too little memory even alone: they have token
                0.
        """
        found = [
            self._sample_one(
                logits[place : place + 1],
                rows[place : place + 1],
                None if uniform is None else uniform[place : place + 1],
            )
            for place in range(len(rows))
        ]
        wanted = self._batch.metadata(rows).logprobs
        missing = SamplerOutput(
            torch.zeros(1, dtype=torch.int64, device=logits.device),
            torch.ones(1, dtype=torch.float32, device=logits.device),
        )
        parts = [missing if part is None else part for part in found]
        output = SamplerOutput(
            torch.cat([part.token_ids for part in parts]),
            torch.cat([part.masses.double() for part in parts]),
            None if wanted is None else _joined(parts, wanted, logits.device),
        )
        return output, [int(row) for row, part in zip(rows, found, strict=True) if part is None]

    def _sample_one(
        self, logits: Tensor, row: NDArray[np.int64], uniform: Tensor | None
    ) -> SamplerOutput | None:
        with self._allocations.attempt() as attempt:
            metadata = self._batch.metadata(row)
            constraints = self._batch.constraints(row, self._grammar_mask(row))
            sampled = self._sampler(logits, metadata, uniform, constraints)
        return None if attempt.failed else sampled


def _joined(parts: Sequence[SamplerOutput], wanted: LogprobRows, device: torch.device) -> LogprobsTensors:
    """Join the log probabilities of all rows that want some; where a row wants fewer than another, zeros
    follow."""
    shape = (len(wanted.positions), max(wanted.counts) + 1)
    token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs = torch.zeros(shape, dtype=torch.float32, device=device)
    ranks = torch.zeros(shape[0], dtype=torch.int64, device=device)
    for place, position in enumerate(wanted.positions):
        own = parts[position].logprobs
        if own is not None:
            width = own.logprobs.shape[1]
            token_ids[place, :width], logprobs[place, :width] = own.token_ids[0], own.logprobs[0]
            ranks[place] = own.ranks[0]
    return LogprobsTensors(token_ids, logprobs, ranks)
