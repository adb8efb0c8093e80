"""Decoders whose output is a classification of the prompt: rerankers, reward models, classifiers."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nbengine.models.decoder import DecoderForCausalLM
from nbengine.models.decoder_config import DecoderConfig
from nbengine.models.layers import Linear


class DecoderForSequenceClassification(DecoderForCausalLM):
    """A decoder with a linear head on the last token in place of its output projection."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        tied = dataclasses.replace(config, tie_word_embeddings=True)
        super().__init__(tied, dtype=dtype, device=device, max_positions=max_positions)
        self.score = Linear(config.hidden_size, config.num_labels, bias=False, dtype=dtype, device=device)

    def classify(self, hidden: Tensor) -> Tensor:
        """Logits [N, num_labels] of the prompts whose last tokens' hidden states are [N, hidden]."""
        return self.score(hidden.to(self.dtype))

    def weight_slots(self) -> dict[str, Tensor]:
        """The tensors to load, under the names of Hugging Face checkpoints."""
        return {**super().weight_slots(), **dict(self.score.slots("score"))}


def make_decoder(
    config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, max_positions: int | None = None
) -> DecoderForCausalLM:
    """The decoder of a configuration, its weights not loaded yet."""
    kind = DecoderForSequenceClassification if config.num_labels else DecoderForCausalLM
    return kind(config, dtype=dtype, device=device, max_positions=max_positions)
