"""The sampler: a batch of logits in, one token a row out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.sampling.draw import draw, draw_filtered
from nbengine.sampling.logits import TokenMask, add_bias, apply_mask, ban, float_copy
from nbengine.sampling.logits_processor import LogitsProcessor
from nbengine.sampling.logprobs import LogprobsTensors, compute_logprobs
from nbengine.sampling.metadata import RandomRows, SamplingMetadata
from nbengine.sampling.rows import pieces, take_rows


@dataclass(frozen=True, slots=True)
class StepConstraints:
    """What holds for one step alone; the rest is in `SamplingMetadata` until the batch changes."""

    grammar: TokenMask | None = None
    banned: Tensor | None = None
    """int64, into the flattened logits: ends of multi-token bad words, and ends of text before `min_tokens`."""
    rows: NDArray[np.int64] | None = None
    """int64 [N], the rows of the persistent batch; needed by logits processors alone."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """What came of a batch of N rows, on the device."""

    token_ids: Tensor
    """int64 [N]"""
    logprobs: LogprobsTensors | None = None
    """Of the rows that asked for them, in the order of `SamplingMetadata.logprobs`."""


class Sampler:
    """Samples every row of a batch, each with its own parameters.

    The order is: float32 logits, structured output's mask, logits processors, allowed tokens, bad words,
    `min_tokens` and logit bias, penalties; then for random rows temperature, min-p, top-k/top-p and the draw.
    Log probabilities are those of the logits as they came. A step costs nothing for what no request in the
    batch asks for.
    """

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = processors

    def __call__(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        uniform: Tensor | None = None,
        step: StepConstraints | None = None,
    ) -> SamplerOutput:
        """Sample one token a row.

        Args:
            logits: [N, V], any floating dtype; may be overwritten.
            metadata: parameters of the N rows.
            uniform: float64 [N] in [0, 1); only random rows' entries count, None when there are no such rows.
            step: what else holds in this step.

        Returns:
            The tokens. A greedy row gives the lowest id among equally likely tokens; a row for which every
            token is forbidden gives any.

        Raises:
            NBEngineError: a logits processor gave logits of another shape or dtype.
        """
        step = _NO_CONSTRAINTS if step is None else step
        wanted = metadata.logprobs
        changes = metadata.changes_logits or self._processors or step is not _NO_CONSTRAINTS
        raw = None
        if wanted is not None:
            raw = float_copy(logits, wanted.rows) if changes else take_rows(logits, wanted.rows)
        if changes:
            logits = self._changed(logits.float(), metadata, step)
        token_ids = _sampled(logits, metadata, uniform)
        logprobs = None
        if wanted is not None and raw is not None:
            logprobs = compute_logprobs(raw, take_rows(token_ids, wanted.rows), max(wanted.counts))
        return SamplerOutput(token_ids, logprobs)

    def _changed(self, logits: Tensor, metadata: SamplingMetadata, step: StepConstraints) -> Tensor:
        """Apply everything that changes which token is the most likely one."""
        if step.grammar is not None:
            apply_mask(logits, step.grammar)
        if self._processors and step.rows is not None:
            logits = self._custom(logits, step.rows)
        if metadata.allowed is not None:
            apply_mask(logits, metadata.allowed)
        for index in (metadata.banned, step.banned):
            if index is not None:
                ban(logits, index)
        if metadata.bias is not None:
            add_bias(logits, metadata.bias)
        if metadata.penalties is not None:
            metadata.penalties.table.apply(logits, metadata.penalties)
        return logits

    def _custom(self, logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
        for processor in self._processors:
            changed = processor.apply(logits, rows)
            if changed.shape != logits.shape or changed.dtype != logits.dtype:
                raise NBEngineError(
                    f"the logits processor {type(processor).__name__} returned {changed.dtype} "
                    f"{tuple(changed.shape)} for {logits.dtype} {tuple(logits.shape)}"
                )
            logits = changed.contiguous()
        return logits


_NO_CONSTRAINTS = StepConstraints()


def _sampled(logits: Tensor, metadata: SamplingMetadata, uniform: Tensor | None) -> Tensor:
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    if metadata.greedy_rows is not None:
        for rows, _ in pieces(metadata.greedy_rows, logits):
            tokens[rows] = _argmax(logits[rows].float())
    if uniform is not None:
        for group in metadata.random:
            for rows, members in pieces(group.rows, logits):
                tokens[rows] = _drawn(logits[rows].float(), uniform[rows], group, members)
    return tokens


def _drawn(logits: Tensor, uniform: Tensor, group: RandomRows, members: slice) -> Tensor:
    scaled = logits / group.temperature[members]
    if group.filters is None:
        return draw(scaled, uniform)
    return draw_filtered(scaled, uniform, group.filters.select(members))


def _argmax(logits: Tensor) -> Tensor:
    if logits.device.type == "cpu":
        # The same result as torch.argmax, the first of equal maxima, at a sixth of its time.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
