"""The gated feed-forward block of a decoder's layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nbengine.distributed.communicator import ParallelState
from nbengine.models.layers import Slots
from nbengine.models.parallel_layers import MergedColumnParallelLinear, row_parallel_linear


class DecoderMLP:
    """The gated feed-forward block: `down(silu(gate(x)) * up(x))`."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelState,
    ) -> None:
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size,
            [("gate_proj", intermediate_size), ("up_proj", intermediate_size)],
            layout=parallel.layout,
            bias=bias,
            dtype=dtype,
            device=device,
        )
        self.down_proj = row_parallel_linear(
            intermediate_size, hidden_size, parallel=parallel, bias=bias, dtype=dtype, device=device
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised hidden states x [T, hidden] to the block's output [T, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate).mul_(up))

    def slots(self, prefix: str) -> Slots:
        """The weights under the checkpoint's names."""
        yield from self.gate_up_proj.slots(prefix)
        yield from self.down_proj.slots(f"{prefix}.down_proj")
