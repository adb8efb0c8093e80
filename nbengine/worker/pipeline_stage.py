"""A rank's part of a forward pass: where its hidden states come from, and where they go."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.distributed.data_parallel import rehearsal
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.worker.attention_metadata import AttentionMetadata
from nbengine.worker.step_inputs import StepInputs


class PipelineStage:
    """Embeds the tokens of a step or gets its hidden states from the stage before, and sends them on unless it is
    the last.

    Both stages know the shape of what they exchange from the step's plan. The stages' tensor-parallel ranks have a line
    each: what the ranks of a stage have is the same, and what they send too.
    """

    def __init__(self, model: DecoderForCausalLM, parallel: ParallelState = SINGLE) -> None:
        self._model = model
        self._previous = parallel.previous
        self._next = parallel.next
        self._parallel = parallel
        self.is_last = parallel.next is None
        """Whether this rank has the hidden states that logits and poolings are made of."""

    def forward(self, inputs: StepInputs, kv_caches: list[Tensor]) -> Tensor | None:
        """Hidden states [T, hidden] after the final norm; None where they have been sent on to the next stage."""
        self._parallel.dp.begin_step(len(inputs.input_ids))
        hidden = self._model.forward(
            inputs.input_ids, inputs.positions, kv_caches, inputs.attention, self._embeds(inputs)
        )
        if self._next is None:
            return hidden
        self._next.send(hidden)
        return None

    def forward_nothing(self) -> None:
        """Take part in a step of the other engine cores without tokens; no other stage hears of it."""
        self._parallel.dp.begin_step(0)
        self._model.dummy_forward()

    def forward_alone(
        self, positions: Tensor, kv_caches: list[Tensor], attention: AttentionMetadata
    ) -> Tensor | None:
        """`forward` of dummy data for the memory it takes, with the other ranks of the stage but no other stage and no other
        engine core: those may be about something else."""
        embeds = None
        if self._previous is not None:
            shape = (len(positions), self._model.config.hidden_size)
            embeds = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        with rehearsal(self._parallel):
            hidden = self._model.forward(positions, positions, kv_caches, attention, embeds)
        return hidden if self.is_last else None

    def _embeds(self, inputs: StepInputs) -> Tensor | None:
        """What takes the place of the embedded tokens, if anything does."""
        if self._previous is not None:
            shape = (len(inputs.input_ids), self._model.config.hidden_size)
            return self._previous.receive(shape, self._model.dtype)
        if not inputs.prompt_embeds:
            return None
        embeds = self._model.embed(inputs.input_ids)
        for start, given in inputs.prompt_embeds:
            embeds[start : start + len(given)].copy_(given)
        return embeds
