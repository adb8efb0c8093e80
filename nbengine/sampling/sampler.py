"""The sampler: a batch of logits goes in, one token a row comes out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.kernels.draw_parameters import UNDECIDED
from nbengine.sampling.compiled_draws import CompiledDraws
from nbengine.sampling.draw import draw, draw_filtered
from nbengine.sampling.logits import TokenMask, add_bias, apply_mask, ban, float_copy
from nbengine.sampling.logits_processor import LogitsProcessor
from nbengine.sampling.logprobs import LogprobsTensors, compute_logprobs
from nbengine.sampling.metadata import RandomRows, SamplingMetadata
from nbengine.sampling.rows import ALL_ROWS, Rows, pieces, take_rows


@dataclass(frozen=True, slots=True)
class StepConstraints:
    """The constraints of one step alone; the others are in `SamplingMetadata` until the batch changes."""

    grammar: TokenMask | None = None
    banned: Tensor | None = None
    """int64, places in the flattened logits: ends of multi-token bad words, and ends of text before
    `min_tokens`."""
    rows: NDArray[np.int64] | None = None
    """int64 [N], the rows of the persistent batch; only logits processors need them."""


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The outcome of a batch of N rows, on the device."""

    token_ids: Tensor
    """int64 [N], a token id in every row, also where there was nothing to sample from."""
    masses: Tensor
    """float32 or float64 [N], a number that sampling a row comes across anyway: it is finite exactly where
    the row's largest logit is. Minus infinity says that every token was forbidden; NaN can mean that too."""
    logprobs: LogprobsTensors | None = None
    """The log probabilities of the rows that asked for them, in the order of `SamplingMetadata.logprobs`."""


class Sampler:
    """A sampler draws a token for every row of a batch, each with its own parameters.

    The order is: float32 logits, structured output's mask, logits processors, allowed tokens, bad words,
    `min_tokens` and logit bias, penalties; then for random rows temperature, min-p, top-k/top-p and the draw.
    Log probabilities are those of the logits as they came. A step costs nothing for what no request in the
    batch asks for.
    """

    def __init__(
        self, processors: Sequence[LogitsProcessor] = (), draws: CompiledDraws | None = None
    ) -> None:
        """Keep what changes logits, and what draws from those on the CPU; None: torch does."""
        self._processors = processors
        self._draws = draws

    def __call__(
        self,
        logits: Tensor,
        metadata: SamplingMetadata,
        uniform: Tensor | None = None,
        step: StepConstraints | None = None,
        largest: tuple[Tensor, Tensor] | None = None,
    ) -> SamplerOutput:
        """Sample one token a row.

        Args:
            logits: [N, V], any floating dtype; may be overwritten.
            metadata: parameters of the N rows.
            uniform: float64 [N] in [0, 1); only random rows' entries count; None when there are no such rows.
            step: the constraints of this step alone.
            largest: the place of each row's largest logit, int64 [N], and that logit, where they are known.

        Returns:
            The tokens. A greedy row gives the lowest id among equally likely tokens. A row that has NaN or
            infinity, or whose every token is forbidden, gives any, and a mass that is not finite.

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
        if largest is None or changes or metadata.greedy_rows is not ALL_ROWS:
            largest = _sampled(logits, metadata, uniform, self._draws)
        token_ids, masses = largest
        logprobs = None
        if wanted is not None and raw is not None:
            logprobs = compute_logprobs(raw, take_rows(token_ids, wanted.rows), max(wanted.counts))
        return SamplerOutput(token_ids, masses, logprobs)

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


def _sampled(
    logits: Tensor, metadata: SamplingMetadata, uniform: Tensor | None, draws: CompiledDraws | None
) -> tuple[Tensor, Tensor]:
    """Return `SamplerOutput.token_ids` and `SamplerOutput.masses`."""
    parts = list(_parts(logits, metadata, uniform, draws))
    if len(parts) == 1:
        # The parts together are all rows, so a single part has all of them.
        _, tokens, masses = parts[0]
        return tokens, masses
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    masses = torch.empty(logits.shape[0], dtype=torch.float64, device=logits.device)
    for rows, some_tokens, some_masses in parts:
        tokens[rows], masses[rows] = some_tokens, some_masses.double()
    return tokens, masses


def _parts(
    logits: Tensor, metadata: SamplingMetadata, uniform: Tensor | None, draws: CompiledDraws | None
) -> Iterator[tuple[Rows, Tensor, Tensor]]:
    """Sample all rows, some of them at a time."""
    if metadata.greedy_rows is not None:
        for rows, _ in pieces(metadata.greedy_rows, logits):
            yield rows, *_largest(logits[rows].float())
    if uniform is not None:
        for group in metadata.random:
            for rows, members in pieces(group.rows, logits):
                yield rows, *_drawn(logits[rows].float(), uniform[rows], group, members, draws)


def _drawn(
    logits: Tensor, uniform: Tensor, group: RandomRows, members: slice, draws: CompiledDraws | None
) -> tuple[Tensor, Tensor]:
    if draws is None:
        return _drawn_by_torch(logits, uniform, group, members)
    parameters = group.draws[members]
    parameters["uniform"] = uniform.numpy()
    tokens, masses = draws(logits, parameters)
    found = np.flatnonzero(tokens.numpy() == UNDECIDED)
    if len(found):
        rest = torch.from_numpy(found)
        tokens[rest], _ = _drawn_by_torch(logits[rest], uniform[rest], group, rest + members.start)
    return tokens, masses


def _drawn_by_torch(
    logits: Tensor, uniform: Tensor, group: RandomRows, members: Rows
) -> tuple[Tensor, Tensor]:
    scaled = logits / group.temperature[members]
    if group.filters is None:
        return draw(scaled, uniform)
    return draw_filtered(scaled, uniform, group.filters.select(members))


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the largest logit of each row is, and its value; NaN counts as larger than any number."""
    if logits.device.type == "cpu":
        # The same result as torch's, the first of equals, at a sixth of its time.
        array = logits.numpy()
        columns = array.argmax(-1)
        return torch.from_numpy(columns), torch.from_numpy(array[np.arange(len(array)), columns])
    ids = logits.argmax(-1)
    return ids, logits.gather(1, ids[:, None])[:, 0]
