"""The sampling of a step: the tokens of its requests, whatever they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from nbengine.kernels.transfer import upload
from nbengine.sampling.compiled_draws import compiled_draws
from nbengine.sampling.logits import TokenMask
from nbengine.sampling.logits_processor import LogitsProcessor
from nbengine.sampling.logprobs import LogprobRows
from nbengine.sampling.rows import rows_of
from nbengine.sampling.sampler import Sampler, SamplerOutput
from nbengine.scheduler.output import GrammarOutput
from nbengine.worker.batch.allocation import Allocations
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.row_by_row import RowByRow, StepLogits
from nbengine.worker.batch.staging import StagingBuffer


class StepSampling:
    """The sampler with the batch whose rows it samples."""

    def __init__(
        self,
        batch: InputBatch,
        processors: Sequence[LogitsProcessor],
        allocations: Allocations,
        device: torch.device,
    ) -> None:
        self._batch = batch
        self._has_processors = bool(processors)
        # Compiled here, so that no step waits for it.
        self._sampler = Sampler(processors, compiled_draws() if device.type == "cpu" else None)
        self._allocations = allocations
        self._device = device
        self._uniform = StagingBuffer(len(batch.rows), torch.float64, device)

    def sample(
        self, logits: StepLogits, rows: NDArray[np.int64], grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, LogprobRows | None]:
        """Sample a token for each of `rows`, and let what follows tokens on the device take them in; return the tokens,
        and who wants log probabilities. Requests for which there is too little memory are starved."""
        batch = self._batch.sampling
        metadata = batch.metadata(rows)
        uniform = None
        if metadata.random:
            self._uniform.array[: len(rows)] = batch.uniforms(rows)
            uniform = self._uniform.tensor(len(rows))
        is_counted = not (metadata.asks_more or grammar_output or self._has_processors)
        with self._allocations.attempt(is_counted=is_counted) as together:
            constraints = batch.constraints(rows, self._grammar_mask(grammar_output, rows))
            output = self._sampler(logits.take(), metadata, uniform, constraints, logits.largest)
        if together.failed:
            mask = partial(self._some_of_grammar_mask, grammar_output)
            alone = RowByRow(self._sampler, batch, self._allocations, mask)
            output, starved = alone.sample(logits.again(), rows, uniform)
            self._allocations.starve(self._batch.req_ids[row] for row in starved)
        self._batch.append_on_device(output.token_ids)
        return output, metadata.logprobs

    def _some_of_grammar_mask(
        self, grammar_output: GrammarOutput | None, rows: NDArray[np.int64]
    ) -> TokenMask | None:
        """Return the `_grammar_mask` of fewer rows than the step has."""
        if grammar_output is None:
            return None
        row_of = self._batch.row_of
        here = [place for place, name in enumerate(grammar_output.req_ids) if row_of[name] in rows]
        some = GrammarOutput([grammar_output.req_ids[place] for place in here], grammar_output.bitmask[here])
        return self._grammar_mask(some, rows)

    def _grammar_mask(
        self, grammar_output: GrammarOutput | None, rows: NDArray[np.int64]
    ) -> TokenMask | None:
        if grammar_output is None or not grammar_output.req_ids:
            return None
        row_of = self._batch.row_of
        wanted = np.fromiter(
            map(row_of.__getitem__, grammar_output.req_ids), np.int64, len(grammar_output.req_ids)
        )
        order = rows.argsort()
        positions = order[rows[order].searchsorted(wanted)]
        bitmask = upload(grammar_output.bitmask, self._device)
        return TokenMask(rows_of(positions, len(rows), self._device), bitmask)
