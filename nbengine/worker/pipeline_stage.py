"""A rank's part of a forward pass: it takes hidden states from the stage before and sends them to the next
one."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.data_parallel import rehearsal
from nbengine.kernels.attention_metadata import AttentionMetadata
from nbengine.kernels.step_metadata import StepMetadata
from nbengine.models.causal_model import CausalModel
from nbengine.models.further_steps import FurtherSteps
from nbengine.models.step_output import StepOutput
from nbengine.worker.batch.step_inputs import StepInputs


class PipelineStage:
    """A stage that embeds the tokens of a step or gets its hidden states from the stage before, and sends
    them on unless it is the last.

    Both stages know the shape of what they exchange from the step's plan. Each tensor-parallel rank of a
    stage has its own link: the ranks of a stage all have the same hidden states, and send the same.
    """

    def __init__(self, model: CausalModel, parallel: ParallelState = SINGLE) -> None:
        self._model = model
        self._previous = parallel.previous
        self._next = parallel.next
        self._parallel = parallel
        self.is_last = parallel.next is None
        """True when this rank has the hidden states from which logits and poolings are made."""

    def forward(
        self, inputs: StepInputs, kv_caches: list[Tensor], further: FurtherSteps | None = None
    ) -> StepOutput | None:
        """Return the outcome for all tokens, after the final norm; None where hidden states have been sent on to
        the next stage. See `CausalModel.step` for what may follow."""
        if self._parallel.dp.size > 1:
            self._parallel.dp.begin_step(len(inputs.input_ids))
        output = self._model.step(
            inputs.input_ids, inputs.positions, kv_caches, inputs.attention, self._embeds(inputs), further
        )
        if self._next is None:
            return output
        self._next.send(output.hidden)
        return None

    def forward_nothing(self) -> None:
        """Take part in a step of the other engine cores without tokens; no other stage hears of it."""
        self._parallel.dp.begin_step(0)
        self._model.dummy_forward()

    def forward_alone(
        self, positions: Tensor, kv_caches: list[Tensor], attention: AttentionMetadata | StepMetadata
    ) -> Tensor | None:
        """Do what `forward` does, on dummy data for the memory that it takes, with the other ranks of the
        stage but no other stage and no other engine core: those may be busy with something else."""
        embeds = None
        if self._previous is not None:
            shape = (len(positions), self._model.config.hidden_size)
            embeds = torch.zeros(shape, dtype=self._model.hidden_dtype, device=self._model.device)
        with rehearsal(self._parallel):
            hidden = self._model.forward(positions, positions, kv_caches, attention, embeds)
        return hidden if self.is_last else None

    def _embeds(self, inputs: StepInputs) -> Tensor | None:
        """Return what takes the place of the embedded tokens, if anything does."""
        if self._previous is not None:
            shape = (len(inputs.input_ids), self._model.config.hidden_size)
            return self._previous.receive(shape, self._model.hidden_dtype)
        if not inputs.prompt_embeds:
            return None
        embeds = self._model.embed(inputs.input_ids)
        for start, given in inputs.prompt_embeds:
            embeds[start : start + len(given)].copy_(given)
        return embeds
