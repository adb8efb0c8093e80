"""The blocks with a recurrent state that a layer may have in place of attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.recurrent_metadata import NO_SOURCE, build_recurrent_metadata
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.layers.gated_convolution import GatedConvolution
from nbengine.models.layers.gated_delta_net import GatedDeltaNet, RecurrentState
from nbengine.models.layers.mamba2 import Mamba2Mixer
from nbengine.models.layers.weights import Place, Slots

if TYPE_CHECKING:
    from nbengine.kernels.dispatch import RecurrentKernels
    from nbengine.kernels.recurrent_metadata import RecurrentMetadata


class RecurrentMixer(Protocol):
    """A block with a recurrent state."""

    def __call__(
        self, x: Tensor, angles: list[Tensor], states: RecurrentState, metadata: RecurrentMetadata
    ) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the block's output [T, hidden]."""

    def new_state(self, num_slots: int) -> RecurrentState:
        """Return the memory of `num_slots` states."""

    def warm_up(self, metadata: RecurrentMetadata) -> None:
        """Compute the tokens of a step, which are zeros, between the projections."""

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the names that the family gives the checkpoint's."""


def warm_up_recurrent(mixer: RecurrentMixer, kernels: RecurrentKernels, device: torch.device) -> None:
    """Compile what recurrent layers of this kind need, for requests of one token and for others."""
    counts = np.array([1, 2], np.int32)
    slots, zeros = np.arange(2, dtype=np.int32), np.full(2, NO_SOURCE, np.int32)
    mixer.warm_up(build_recurrent_metadata(counts, slots, zeros, num_slots=2, kernels=kernels, device=device))


def make_recurrent_mixer(config: DecoderConfig, place: Place, parallel: ParallelState) -> RecurrentMixer:
    """Make the block whose sizes the configuration has."""
    if config.mamba2 is not None:
        return Mamba2Mixer(config, place, parallel)
    if config.short_conv is not None:
        return GatedConvolution(config, place, parallel)
    return GatedDeltaNet(config, place, parallel)
