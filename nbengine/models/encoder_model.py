"""The encoder as workers and loaders see it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nbengine.models.configs.encoder_config import AnyEncoderConfig
    from nbengine.models.layers.encoder_attention import PromptGroup
    from nbengine.models.layers.weights import WeightSlot


class EncoderModel(ABC):
    """An encoder, which is run under `torch.inference_mode` on whole prompts. Weights are uninitialised until a loader
    has filled `weight_slots()`; on the device "meta" they take no memory."""

    config: AnyEncoderConfig
    dtype: torch.dtype
    device: torch.device
    on_layers: Callable[[int], None]
    """See `nbengine.models.causal_model.CausalModel.on_layers`."""

    @abstractmethod
    def forward(
        self, input_ids: Tensor, positions: Tensor, token_types: Tensor, groups: list[PromptGroup]
    ) -> Tensor:
        """Return the hidden states [T, hidden] of a flat batch of whole prompts in ascending order of length.

        `input_ids`, `positions` (from 0 in each prompt) and `token_types` are int64 [T].
        """

    @abstractmethod
    def classify(self, hidden: Tensor) -> Tensor:
        """Return the logits [N, num_labels] of the prompts whose pooled hidden states are [N, hidden]."""

    @abstractmethod
    def weight_slots(self) -> dict[str, WeightSlot]:
        """Return the places of the weights, under the names of Hugging Face checkpoints."""

    @property
    @abstractmethod
    def ignored_weights(self) -> frozenset[str]:
        """Return the tensors that a checkpoint may have and that nothing here uses."""

    @abstractmethod
    def parameters(self) -> Iterator[Tensor]:
        """Yield every weight once."""

    @property
    def weights_bytes(self) -> int:
        """Return the memory of the weights in bytes."""
        return sum(weight.nbytes for weight in self.parameters())
