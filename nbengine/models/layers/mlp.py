"""The feed-forward block of a decoder's layer, and the activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.kernels.row_kernels import select_gate
from nbengine.models.configs.decoder_config import UNGATED
from nbengine.models.layers.parallel_layers import MergedColumnParallelLinear, row_parallel_linear
from nbengine.models.layers.weights import Place, Slots

ACTIVATE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square_(),
}
"""The activations, by the names of `nbengine.models.configs.decoder_config.ACTIVATIONS`."""


def activated(activation: str, gate_up: Tensor) -> Tensor:
    """Return what goes into the last projection, [T, size]: the activation of the gate, the first half of `gate_up`
    [T, 2 * size], times the second half, or that of all of it, [T, size], where there is no gate."""
    if activation in UNGATED:
        return ACTIVATE[activation](gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATE[activation](gate).mul_(up)


class DecoderMLP:
    """The feed-forward block `down(activation(gate(x)) * up(x))`, or without a gate `down(activation(up(x)))`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        place: Place,
        parallel: ParallelState,
        activation: str = "silu",
    ) -> None:
        self.activation = activation
        self.size = intermediate_size // parallel.layout.tp_size
        self._compiled = None
        if not place.is_exact:
            self._compiled = select_gate(place.device, place.hidden_dtype, self.size, activation)
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [(name, intermediate_size) for name in ("gate_proj", "up_proj")[activation in UNGATED :]],
            layout=parallel.layout,
            bias=bias,
            place=place,
        )
        self.down_proj = row_parallel_linear(
            intermediate_size, hidden_size, parallel=parallel, bias=bias, place=place.inside("down_proj")
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Turn normalised hidden states x [T, hidden] into the block's output [T, hidden]."""
        gate_up = self.gate_up_proj(x)
        if self._compiled is not None:
            return self.down_proj(self._compiled(gate_up))
        return self.down_proj(activated(self.activation, gate_up))

    def slots(self, prefix: str) -> Slots:
        """Yield the weights under the checkpoint's names."""
        yield from self.gate_up_proj.slots(prefix)
        yield from self.down_proj.slots(f"{prefix}.down_proj")
