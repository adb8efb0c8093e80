"""The small functions between a layer's products, each a pass over rows, and the choice of those of a device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from nbengine.kernels.cpu.row_calls import CpuDeltaGates, CpuGroupNorm, CpuSoftCap, CpuSoftplus


class RowNorm(Protocol):
    """The normalisation of rows with a weight, rounded once."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension of x [..., size]; the result is contiguous."""

    def after_adding(self, x: torch.Tensor, added: torch.Tensor, scale: float) -> torch.Tensor:
        """Add `added` [T, size] times `scale` to x [T, size], whose rows are contiguous, in place; return x
        normalised."""


def select_rms_norm(weight: torch.Tensor, eps: float, dtype: torch.dtype) -> RowNorm | None:
    """Return the normalisation of rows of type `dtype` with this weight; None where plain torch has to do it."""
    size = len(weight)
    if _has_triton_rows(weight.device, dtype):
        from nbengine.kernels.triton.row_functions import MAX_ROW, TritonRMSNorm

        return TritonRMSNorm(weight, eps, dtype) if size <= MAX_ROW else None
    if weight.dtype is not dtype or not has_compiled_rows(weight.device, dtype, size):
        return None
    from nbengine.kernels.cpu.row_calls import CpuRMSNorm

    return CpuRMSNorm(weight, eps)


def select_gate(
    device: torch.device, dtype: torch.dtype, size: int, activation: str | tuple[float, float]
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the function of [T, 2 * size] that multiplies the activation ("silu", "gelu_tanh", …; or alpha and limit of
    a clamped gate) of the first half of each row with the second half, or, of "relu2", that of [T, size] that has no
    second half; None where plain torch has to do it."""
    if _has_triton_rows(device, dtype):
        from nbengine.kernels.triton.row_functions import ACTIVATIONS, TritonGate

        if isinstance(activation, str) and activation in ACTIVATIONS:
            return TritonGate(size, dtype, activation, device)
        return None
    if not has_compiled_rows(device, dtype, size):
        return None
    from nbengine.kernels.cpu.row_calls import CpuGate
    from nbengine.kernels.cpu.vectors import GATES

    is_there = isinstance(activation, tuple) or activation in GATES
    return CpuGate(size, dtype, activation) if is_there else None


def select_pair_gate(
    device: torch.device, dtype: torch.dtype, size: int, activation: str
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the function of gate and other, both [T, size], that multiplies the activation of the one with the
    other; None where plain torch has to do it."""
    if _has_triton_rows(device, dtype):
        from nbengine.kernels.triton.row_functions import TritonPairGate

        return TritonPairGate(size, dtype, activation, device)
    if not has_compiled_rows(device, dtype, size):
        return None
    from nbengine.kernels.cpu.row_calls import CpuPairGate

    return CpuPairGate(size, dtype, activation)


def select_delta_gates(device: torch.device, dtype: torch.dtype, heads: int) -> CpuDeltaGates | None:
    """Return what computes the gates of the delta rule for hidden states of this type; None where plain torch has to
    do it."""
    if dtype is not torch.float32 or not has_compiled_rows(device, dtype, 0):
        return None
    from nbengine.kernels.cpu.row_calls import CpuDeltaGates

    return CpuDeltaGates(heads)


def select_softplus(device: torch.device, dtype: torch.dtype, size: int) -> CpuSoftplus | None:
    """Return what computes softplus of the sum of rows of this type and a vector; None where plain torch has to do it."""
    if dtype is not torch.float32 or not has_compiled_rows(device, dtype, 0):
        return None
    from nbengine.kernels.cpu.row_calls import CpuSoftplus

    return CpuSoftplus(size)


def select_group_norm(
    weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype
) -> CpuGroupNorm | None:
    """Return the normalisation of each of some groups of numbers of a row, with this weight; None where plain torch has
    to do it."""
    if weight.dtype is not dtype or not has_compiled_rows(weight.device, dtype, len(weight) // groups):
        return None
    from nbengine.kernels.cpu.row_calls import CpuGroupNorm

    return CpuGroupNorm(weight, groups, eps)


def select_soft_cap(device: torch.device, dtype: torch.dtype, size: int, cap: float) -> CpuSoftCap | None:
    """Return the function that keeps numbers of rows of `size` below a cap, in place; None where plain torch has to do
    it."""
    if dtype is not torch.float32 or not has_compiled_rows(device, dtype, 0):
        return None
    from nbengine.kernels.cpu.row_calls import CpuSoftCap

    return CpuSoftCap(size, cap)


def select_rotation(
    device: torch.device, dtype: torch.dtype, heads: int, head_dim: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return the function that turns heads [T, heads, head_dim] by angles [T, 2, head_dim], cosines before
    signed sines; None where plain torch has to do it."""
    if head_dim % 2:
        return None
    if _has_triton_rows(device, dtype):
        from nbengine.kernels.triton.row_functions import TritonRotation

        return TritonRotation(heads, head_dim, dtype, device)
    if not has_compiled_rows(device, dtype, head_dim // 2):
        return None
    from nbengine.kernels.cpu.row_calls import CpuRotation

    return CpuRotation(heads, head_dim, dtype)


def has_compiled_rows(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Return whether a CPU's functions of rows of `size` numbers are compiled here."""
    if device.type != "cpu" or importlib.util.find_spec("llvmlite") is None:
        return False
    from nbengine.kernels.cpu.row_functions import supports_rows

    return supports_rows(device, dtype, size)


def _has_triton_rows(device: torch.device, dtype: torch.dtype) -> bool:
    # The bits of float32 are those of torch's operations.
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    return importlib.util.find_spec("triton") is not None
