"""Decoders whose output is a classification of the prompt: rerankers, reward models, classifiers."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from nbengine.errors import NBEngineError
from nbengine.models.causal_model import DecoderOptions
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.families.decoder import DecoderForCausalLM
from nbengine.models.layers.basic import Linear
from nbengine.models.layers.weights import ALL_DENSE, Place, WeightSlot


class DecoderForSequenceClassification(DecoderForCausalLM):
    """A decoder with a linear head on the last token in place of its output projection; every rank of the
    last stage has all of the head."""

    def __init__(
        self,
        config: DecoderConfig,
        **options: Unpack[DecoderOptions],
    ) -> None:
        super().__init__(config, **options)
        self.score: Linear | None = None
        if self.layout.is_last_stage:
            packed = options.get("packed", ALL_DENSE)
            place = Place(self.dtype, self.device, packed, memory=options.get("memory"))
            self.score = Linear(config.hidden_size, config.num_labels, bias=False, place=place)

    def classify(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of the prompts whose last tokens' hidden states are [N, hidden].

        Raises:
            NBEngineError: this is not the last stage.
        """
        if self.score is None:
            raise NBEngineError(f"{self.layout}: prompts are classified on the last pipeline stage only")
        return self.score(hidden.to(self.hidden_dtype))

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the places of the weights, under the names of Hugging Face checkpoints."""
        slots = super().weight_slots()
        return slots if self.score is None else {**slots, **dict(self.score.slots("score"))}
