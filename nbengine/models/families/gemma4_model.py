"""Gemma 4's decoder: a layer takes numbers of each token beside the residual stream, and scales the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.decoder_layer import DecoderLayer
from nbengine.models.layers.layer_inputs import InputLayer, LayerInputs
from nbengine.models.layers.weights import ALL_DENSE, Place, WeightSlot
from nbengine.models.prepared.steps import PreparedSteps

if TYPE_CHECKING:
    from nbengine.models.causal_model import DecoderOptions


class Gemma4ForCausalLM(DecoderForCausalLM):
    """One rank's part of Gemma 4; see `DecoderForCausalLM`."""

    def __init__(self, config: DecoderConfig, **options: Unpack[DecoderOptions]) -> None:
        super().__init__(config, **options)
        if config.layer_inputs:
            packed = options.get("packed", ALL_DENSE)
            place = Place(self.dtype, self.device, packed, memory=options.get("memory"))
            self.layer_inputs = LayerInputs(config, place, options.get("parallel", SINGLE))
            self._prepared = PreparedSteps(self) if PreparedSteps.covers(self) else None

    def weight_slots(self) -> dict[str, WeightSlot]:
        """See `DecoderForCausalLM.weight_slots`."""
        slots = super().weight_slots()
        if self.layer_inputs is not None:
            slots.update(self.layer_inputs.slots())
        return slots

    def _of_tokens(self, input_ids: Tensor, x: Tensor, positions: Tensor) -> list[Tensor]:
        found = super()._of_tokens(input_ids, x, positions)
        return found if self.layer_inputs is None else [*found, self.layer_inputs.of(input_ids, x)]

    def _layer(self, place: Place, index: int, parallel: ParallelState) -> DecoderLayer:
        mlp = self.feed_forward(index, place.inside("mlp"), parallel)
        return InputLayer(self.config.of_layer(index), index, self.rotaries, mlp, place, parallel)
