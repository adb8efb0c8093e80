"""Several steps that the model computes at once, as the batch sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from nbengine.kernels.draw_parameters import DRAW_ROW
from nbengine.models.further_steps import MOST_FURTHER_STEPS, FurtherSteps
from nbengine.scheduler.output import SchedulerOutput
from nbengine.worker.batch.input_batch import InputBatch
from nbengine.worker.batch.step_inputs import StepInputs

MOST_STEPS = MOST_FURTHER_STEPS + 1
"""Most steps at once."""


@dataclass(frozen=True, slots=True)
class EarlierSteps:
    """The steps before the last one, where several were computed at once."""

    token_ids: list[list[int]]
    """Their tokens, by request."""
    ends: list[float]
    """`time.time()` at the end of each."""


class StepsAtOnce:
    """The further steps that plans allow, with their tokens and times; `stop` may be called on any thread."""

    def __init__(self, batch: InputBatch) -> None:
        self._batch = batch
        token_ids = torch.zeros(MOST_FURTHER_STEPS, len(batch.block_table), dtype=torch.int64)
        self._token_ids = token_ids.numpy()
        self._draws = np.zeros(len(batch.block_table), DRAW_ROW)
        self._further = FurtherSteps(
            ends=torch.from_numpy(batch.sampling.ends),
            stop=torch.zeros(1, dtype=torch.int64),
            token_ids=token_ids,
            draws=torch.from_numpy(self._draws.view(np.uint8).reshape(len(self._draws), -1)),
            ended_at=torch.zeros(MOST_FURTHER_STEPS, 2, dtype=torch.int64),
        )
        self._stop = self._further.stop.numpy()

    def stop(self) -> None:
        """Have the steps that are computed now, or next, end soon."""
        self._stop[0] = 1

    def allowed(self, plan: SchedulerOutput, inputs: StepInputs) -> FurtherSteps | None:
        """Return the steps that may follow one in which every request computes a token; None: there are none."""
        further = self._further
        further.most, further.taken = min(plan.num_steps, MOST_STEPS) - 1, 0
        rows, sampling = inputs.sampled_rows, self._batch.sampling
        if not further.most or not sampling.is_plain(rows):
            return None
        further.has_draws = sampling.put_draws(self._draws[: len(rows)], rows)
        return further

    def take(self, inputs: StepInputs) -> EarlierSteps:
        """Append the tokens of all steps but the last one to the batch, and return them."""
        # What another thread wants looked at is looked at after this step.
        self._stop[0] = 0
        rows = inputs.sampled_rows
        taken = self._further.taken
        token_ids = self._token_ids[:taken, : len(rows)]
        self._batch.append_steps(rows, token_ids)
        ends = [
            seconds + 1e-9 * nanoseconds for seconds, nanoseconds in self._further.ended_at[:taken].tolist()
        ]
        return EarlierSteps(token_ids.T.tolist(), ends)
