"""The sampled tokens of a step, on their way to the host while the next step is prepared and runs.

The tokens stay on the device, from where the next step takes its inputs; the engine's thread waits for their
copy, and this module does so only before the tokens after them are on their way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nbengine.kernels.transfer import upload
from nbengine.sampling.logprobs import LogprobRows, LogprobsTensors
from nbengine.sampling.sampler import SamplerOutput
from nbengine.scheduler.output import AsyncModelRunnerOutput, Fault, ModelRunnerOutput
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.step_inputs import StepInputs


class Transfer(Protocol):
    """Copies of tensors on their way to the host. They are safe to use from several threads."""

    @property
    def is_done(self) -> bool:
        """Return whether `wait` returns at once."""

    def wait(self) -> Sequence[Tensor]:
        """Return the copies when they have arrived."""


StartTransfer = Callable[[Sequence[Tensor]], Transfer]


class CudaTransfer:
    """Copies into pinned memory, in the order of the stream's work."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrived = torch.Event(tensors[0].device)
        self._arrived.record()

    @property
    def is_done(self) -> bool:
        return self._arrived.query()

    def wait(self) -> Sequence[Tensor]:
        self._arrived.synchronize()
        return self._copies


@dataclass(slots=True)
class _Sampled:
    """The tokens of one step: the i-th is token number `positions[i]` of `req_ids[i]`."""

    req_ids: list[str]
    positions: NDArray[np.int64]
    token_ids: Tensor
    transfer: Transfer
    gone: set[str]
    """Requests that have ended since; their ids may be in use again."""


class TokensInFlight:
    """The tokens of the latest step, which the batch already counts and whose values it gets later."""

    def __init__(self, batch: InputBatch, device: torch.device, start_transfer: StartTransfer) -> None:
        self._batch = batch
        self._device = device
        self._start_transfer = start_transfer
        self._latest: _Sampled | None = None

    def prepare(self, finished: Collection[str], preempted: Collection[str]) -> None:
        """Fetch the latest tokens where the batch needs them; to be called before the batch is brought up to
        date: it must know the tokens of a row that it saves."""
        if self._latest is None:
            return
        if preempted or self._batch.sampling.needs_tokens:
            self.settle()
        else:
            self._latest.gone.update(finished)

    def fill(self, inputs: StepInputs) -> None:
        """Write the latest tokens into a step's inputs, on the device, where that step computes them.

        A request whose last token is in flight computes that one token, and is sampled.
        """
        latest = self._latest
        if latest is None or not len(inputs.sampled):
            return
        source = np.full(len(self._batch.rows), -1)
        rows, members = self._rows(latest)
        source[rows] = members
        sources = source[inputs.sampled_rows]
        places = np.flatnonzero(sources >= 0)
        if not len(places):
            return
        tokens = latest.token_ids
        if inputs.logits_index is None and np.array_equal(sources, np.arange(len(tokens))):
            inputs.input_ids[: len(tokens)].copy_(tokens)
            return
        targets = upload(places, self._device)
        if inputs.logits_index is not None:
            targets = inputs.logits_index.index_select(0, targets)
        values = tokens.index_select(0, upload(sources[places], self._device))
        inputs.input_ids.index_copy_(0, targets, values)

    def start(
        self,
        inputs: StepInputs,
        sampled: SamplerOutput,
        logprobs: LogprobRows | None,
        output: ModelRunnerOutput,
    ) -> AsyncOutput:
        """Count what a step has sampled, and start its transfer; that of the step before must have arrived by
        then.

        `output` has everything but the sampled tokens and their log probabilities.
        """
        tensors = [sampled.token_ids, sampled.masses]
        if sampled.logprobs is not None:
            tensors += [sampled.logprobs.token_ids, sampled.logprobs.logprobs, sampled.logprobs.ranks]
        transfer = self._start_transfer(tensors)
        self.settle()
        names = [inputs.req_ids[place] for place in inputs.sampled.tolist()]
        positions = self._batch.append_unknown(inputs.sampled_rows)
        self._latest = _Sampled(names, positions, sampled.token_ids, transfer, set())
        return AsyncOutput(output, inputs, transfer, logprobs)

    def settle(self) -> None:
        """Wait for the latest tokens and write them into their rows."""
        latest, self._latest = self._latest, None
        if latest is not None:
            token_ids = latest.transfer.wait()[0].numpy()
            rows, members = self._rows(latest)
            self._batch.fill_in(rows, latest.positions[members], token_ids[members])

    def _rows(self, sampled: _Sampled) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows that the requests have now, and the places of these requests in the step: some have
        ended."""
        row_of = self._batch.row_of
        found = [
            (row_of[req_id], member)
            for member, req_id in enumerate(sampled.req_ids)
            if req_id in row_of and req_id not in sampled.gone
        ]
        rows, members = np.array(found, np.int64).reshape(-1, 2).T
        return rows, members


class AsyncOutput(AsyncModelRunnerOutput):
    """The outcome of a step, complete when its transfer is."""

    def __init__(
        self,
        output: ModelRunnerOutput,
        inputs: StepInputs,
        transfer: Transfer,
        logprobs: LogprobRows | None,
    ) -> None:
        self._output = output
        self._inputs = inputs
        self._transfer = transfer
        self._logprobs = logprobs

    @property
    def is_ready(self) -> bool:
        return self._transfer.is_done

    def get_output(self) -> ModelRunnerOutput:
        token_ids, masses, *logprobs = self._transfer.wait()
        host = SamplerOutput(token_ids, masses, LogprobsTensors(*logprobs) if logprobs else None)
        fill_output(self._output, self._inputs, host, self._logprobs)
        return self._output


def fill_output(
    output: ModelRunnerOutput, inputs: StepInputs, sampled: SamplerOutput, logprobs: LogprobRows | None
) -> None:
    """Write sampled tokens and their log probabilities, on the host, into a step's output.

    A request that had nothing to sample from, or has a fault already, gets no token.
    """
    places = inputs.sampled.tolist()
    # A step has few rows, and the first calls of numpy after a model has run take long.
    masses = sampled.masses.tolist()
    if not all(map(isfinite, masses)):
        faults = output.faults = output.faults or {}
        for place, mass in zip(places, masses, strict=True):
            if not isfinite(mass):
                fault = Fault.NOTHING_ALLOWED if mass == -inf else Fault.NOT_FINITE
                faults.setdefault(inputs.req_ids[place], fault)
    for place, token in zip(places, sampled.token_ids.tolist(), strict=True):
        output.sampled_token_ids[place].append(token)
    for req_id in output.faults or ():
        # Those of earlier steps, where several were computed at once, are right.
        del output.sampled_token_ids[output.req_ids.index(req_id)][-1:]
    if logprobs is not None and sampled.logprobs is not None:
        names = [inputs.req_ids[inputs.sampled[position]] for position in logprobs.positions]
        output.logprobs = dict(zip(names, sampled.logprobs.to_lists(logprobs.counts), strict=True))
