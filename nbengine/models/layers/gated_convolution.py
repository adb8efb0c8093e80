"""A layer with a recurrent state: a short convolution between two gates, as in LFM2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.models.configs.decoder_config import DecoderConfig
from nbengine.models.layers.gated_delta_net import RecurrentState
from nbengine.models.layers.parallel_layers import MergedColumnParallelLinear, row_parallel_linear
from nbengine.models.layers.weights import Place, Slots, WeightSlot

if TYPE_CHECKING:
    from nbengine.kernels.recurrent_metadata import RecurrentMetadata


class GatedConvolution:
    """The projections and the convolution of one layer, for the channels of this rank."""

    def __init__(self, config: DecoderConfig, place: Place, parallel: ParallelState) -> None:
        sizes, layout = config.short_conv, parallel.layout
        assert sizes is not None
        self.sizes = sizes
        self.channels = sizes.channels // layout.tp_size
        self._start = layout.tp_rank * self.channels
        self._device, self._hidden_dtype = place.device, place.hidden_dtype
        self.in_proj = MergedColumnParallelLinear(
            config.hidden_size,
            [(f"in_proj_{part}", sizes.channels) for part in ("b", "c", "x")],
            layout=layout,
            bias=sizes.bias,
            place=place,
        )
        self.conv_weight = place.vector(self.channels * sizes.kernel).view(self.channels, sizes.kernel)
        self.conv_bias = place.vector(self.channels) if sizes.bias else None
        self.out_proj = row_parallel_linear(
            sizes.channels,
            config.hidden_size,
            parallel=parallel,
            bias=sizes.bias,
            place=place.inside("out_proj"),
        )

    def __call__(
        self, x: Tensor, angles: list[Tensor], states: RecurrentState, metadata: RecurrentMetadata
    ) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the block's output [T, hidden]; there are no positions,
        and `angles` are not used."""
        del angles
        return self.out_proj(self._mix(self.in_proj(x), states, metadata))

    def warm_up(self, metadata: RecurrentMetadata) -> None:
        """Compute the tokens of a step, which are zeros, between the projections."""
        x = torch.zeros(metadata.num_tokens, 3 * self.channels, dtype=self._hidden_dtype, device=self._device)
        self._mix(x, self.new_state(metadata.num_slots), metadata)

    def _mix(self, projected: Tensor, states: RecurrentState, metadata: RecurrentMetadata) -> Tensor:
        before, after, inner = projected.chunk(3, dim=1)
        mixed = metadata.kernels.short_convolution(
            before * inner, self.conv_weight, self.conv_bias, states.conv, metadata, silu=False
        )
        return mixed.mul_(after)

    def new_state(self, num_slots: int) -> RecurrentState:
        """Return the memory of `num_slots` states; there is no matrix in them."""
        shape = (num_slots, self.channels, self.sizes.kernel - 1)
        return RecurrentState(
            torch.zeros(shape, dtype=self._hidden_dtype, device=self._device),
            torch.zeros((num_slots, 0, 0, 0), dtype=torch.float32, device=self._device),
        )

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the names that `nbengine.models.families.lfm2` gives the checkpoint's."""
        yield from self.in_proj.slots(prefix)
        shape = (self.sizes.channels, 1, self.sizes.kernel)
        yield f"{prefix}.conv.weight", WeightSlot(self.conv_weight[:, None], shape, 0, self._start)
        if self.conv_bias is not None:
            yield f"{prefix}.conv.bias", WeightSlot(self.conv_bias, (self.sizes.channels,), 0, self._start)
        yield from self.out_proj.slots(f"{prefix}.out_proj")
