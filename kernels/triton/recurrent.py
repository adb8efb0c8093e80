"""Short convolution, gated delta rule and state space on CUDA devices, through Triton."""

from __future__ import annotations

from torch import Tensor

from nbengine.kernels.recurrent_metadata import RecurrentMetadata
from nbengine.kernels.triton.delta_rule import gated_delta_rule
from nbengine.kernels.triton.short_convolution import short_convolution
from nbengine.kernels.triton.state_space import state_space


class TritonRecurrent:
    """Kernels for a float32, bfloat16 or float16 model on one CUDA device.

    Products of a float32 model are exact to float32, those of others to TensorFloat-32; states are float32.
    """

    name = "triton"

    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv: Tensor,
        metadata: RecurrentMetadata,
        *,
        silu: bool,
    ) -> Tensor:
        """See `nbengine.kernels.dispatch.RecurrentKernels.short_convolution`."""
        return short_convolution(x, weight, bias, conv, metadata, silu=silu)

    def gated_delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        metadata: RecurrentMetadata,
    ) -> Tensor:
        """See `nbengine.kernels.dispatch.RecurrentKernels.gated_delta_rule`."""
        query, key, value = (_heads(x) for x in (query, key, value))
        return gated_delta_rule(query, key, value, decay.contiguous(), beta.contiguous(), state, metadata)

    def state_space(
        self,
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        rate: Tensor,
        skip: Tensor,
        state: Tensor,
        metadata: RecurrentMetadata,
    ) -> Tensor:
        """See `nbengine.kernels.dispatch.RecurrentKernels.state_space`."""
        x, b, c = (_heads(y) for y in (x, b, c))
        return state_space(x, dt.contiguous(), b, c, rate.contiguous(), skip.contiguous(), state, metadata)


def _heads(tensor: Tensor) -> Tensor:
    if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.contiguous()
