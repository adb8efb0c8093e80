"""Decoders whose output is a classification of the prompt: rerankers, reward models, classifiers."""

from __future__ import annotations

import torch
from torch import Tensor

from nbengine.distributed.communicator import SINGLE, ParallelState
from nbengine.errors import NBEngineError
from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.layers import Linear, WeightSlot


class DecoderForSequenceClassification(DecoderForCausalLM):
    """A decoder with a linear head on the last token in place of its output projection; every rank of the last
    stage has all of the head."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
        parallel: ParallelState = SINGLE,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, max_positions=max_positions, parallel=parallel)
        self.score: Linear | None = None
        if parallel.layout.is_last_stage:
            self.score = Linear(config.hidden_size, config.num_labels, bias=False, dtype=dtype, device=device)

    def classify(self, hidden: Tensor) -> Tensor:
        """Logits [N, num_labels] of the prompts whose last tokens' hidden states are [N, hidden].

        Raises:
            NBEngineError: this is not the last stage.
        """
        if self.score is None:
            raise NBEngineError(f"{self.layout}: prompts are classified on the last pipeline stage only")
        return self.score(hidden.to(self.dtype))

    def weight_slots(self) -> dict[str, WeightSlot]:
        """What to load, under the names of Hugging Face checkpoints."""
        slots = super().weight_slots()
        return slots if self.score is None else {**slots, **dict(self.score.slots("score"))}


def make_decoder(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    parallel: ParallelState = SINGLE,
) -> DecoderForCausalLM:
    """The part of a configuration's decoder that a rank has, its weights not loaded yet."""
    kind = DecoderForSequenceClassification if config.num_labels else DecoderForCausalLM
    return kind(config, dtype=dtype, device=device, max_positions=max_positions, parallel=parallel)
